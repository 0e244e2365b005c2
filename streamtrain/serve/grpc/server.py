"""The gRPC server: the same predictor, limits, tokens and metrics as over HTTP, from the same event loop."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from streamtrain.address import binding, parse_listener
from streamtrain.errors import StreamtrainError
from streamtrain.logs import REQUEST
from streamtrain.serve.errors import HTTPError, Overloaded, to_http_error
from streamtrain.serve.service.admission import Admitted
from streamtrain.serve.service.service import REQUEST_ID, Service, request_id

logger = logging.getLogger(__name__)

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    412: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,  # not RESOURCE_EXHAUSTED, which clients retry
    503: grpc.StatusCode.UNAVAILABLE,
}
_MAX_METADATA_BYTES = 64 << 10
_SPARE_CALLS = 64  # beside predictions, such as health checks, which are answered under overload, too


@dataclass(frozen=True)
class Call:
    """A request.

    Attributes:
        data: the message.
        metadata: sent with it.
        began: when it arrived, by `time.perf_counter`.
        admitted: among requests in flight; None: it is not counted.
    """

    data: bytes
    metadata: Mapping[str, str]
    began: float
    admitted: Admitted | None = None


Reply = tuple[Any, Mapping[str, str]]
"""A message, and metadata to send after it."""


@dataclass(frozen=True)
class Method:
    """A method of a service.

    Attributes:
        respond: handles a call. May raise StreamtrainError.
        protocol: of predictions, for the metrics; "": it predicts nothing and needs no admission.
        is_public: whether it needs no read token.
    """

    respond: Callable[[Call], Awaitable[Reply]]
    protocol: str = ""
    is_public: bool = False


M = TypeVar("M", bound=Message)


def parse_message(kind: Callable[[], M], data: bytes) -> M:
    """A message of a kind; one called Raw... is another on the wire, with parts of it left as bytes.

    Raises:
        HTTPError: 400, the bytes are not one.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise HTTPError(400, f"the request is not a {kind.__name__.removeprefix('Raw')}: {exc}") from exc
    return message


class GrpcServer:
    """Serves predictions over gRPC. All calls come from the event loop of `service`.

    Args:
        service: predicts.
        services: by full name, methods by name.
    """

    def __init__(self, service: Service, services: Mapping[str, Mapping[str, Method]]) -> None:
        self._service = service
        config = service.config
        options = {
            "grpc.so_reuseport": int(config.grpc_shares_port),
            "grpc.max_receive_message_length": config.max_body,
            "grpc.max_send_message_length": -1,
            "grpc.max_metadata_size": _MAX_METADATA_BYTES,
        }
        handlers = [
            grpc.method_handlers_generic_handler(
                name, {method: self._handler(f"/{name}/{method}", one) for method, one in methods.items()}
            )
            for name, methods in services.items()
        ]
        self._server = grpc.aio.server(
            handlers=handlers, options=[*options.items()], maximum_concurrent_rpcs=config.max_requests + _SPARE_CALLS
        )

    async def start(self, address: str) -> int:
        """Listens at "host:port" or "[ipv6]:port"; returns the port.

        Raises:
            ConfigError: the address is not a TCP address, in use, or not of this machine.
        """
        target = parse_listener(address, "serve.grpc_listen", "predictions")
        with binding(address, "serve.grpc_listen"):
            port = int(self._server.add_insecure_port(str(target)))
        await self._server.start()
        logger.info("serving gRPC at %s", address if target.port else f"port {port}")
        return port

    async def stop(self, seconds: float) -> None:
        """Takes no more calls, and waits for those in flight, for at most `seconds`."""
        await self._server.stop(seconds)

    def _handler(self, path: str, method: Method) -> Any:
        async def handle(data: bytes, context: Any) -> bytes:
            metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
            call = Call(data, metadata, time.perf_counter())
            identity = request_id(metadata.get(REQUEST_ID, "").encode("latin-1", "replace")).decode()
            REQUEST.set(identity)  # in the task of this call
            code = grpc.StatusCode.CANCELLED  # by the client, or its deadline
            try:
                reply, after = await self._respond(method, call, context)
                context.set_trailing_metadata(((REQUEST_ID, identity), *after.items()))
                code = grpc.StatusCode.OK
                return bytes(reply.SerializeToString())
            except StreamtrainError as exc:
                error = to_http_error(exc)
                code, message = _CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error)
                after = error.headers
            except Exception as exc:
                logger.exception("%s failed", path)
                code, message, after = grpc.StatusCode.INTERNAL, f"internal error: {type(exc).__name__}", {}
            finally:
                if logger.isEnabledFor(logging.DEBUG):
                    took = 1000 * (time.perf_counter() - call.began)
                    logger.debug("%s for %s: %s in %.1f ms", path, context.peer(), code.name, took)
            await context.abort(code, message, ((REQUEST_ID, identity), *after.items()))
            raise AssertionError  # `abort` raises

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _respond(self, method: Method, call: Call, context: Any) -> Reply:
        if not method.is_public:
            self._service.tokens.check_read(call.metadata.get("authorization", ""), context.peer())
        if not method.protocol:
            return await method.respond(call)
        try:
            with self._service.admission.admit() as admitted:
                admitted.take(len(call.data))
                reply = await method.respond(replace(call, admitted=admitted))
        except StreamtrainError as exc:
            if isinstance(exc, Overloaded):
                self._service.admission.count(exc)
            self._service.metrics.answered(method.protocol, to_http_error(exc).status)
            raise
        self._service.metrics.answered(method.protocol, 200)
        return reply
