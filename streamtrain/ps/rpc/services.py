"""What every gRPC service of ours needs: errors as statuses, messages in parts, options of a server."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from streamtrain.errors import (
    CheckpointError,
    ConfigError,
    ShardBroken,
    ShardRefused,
    ShardUnavailable,
    StreamtrainError,
)
from streamtrain.logs import LogThrottle

logger = logging.getLogger(__name__)

_REFUSALS = {
    "malformed": grpc.StatusCode.INVALID_ARGUMENT,
    "mismatch": grpc.StatusCode.FAILED_PRECONDITION,
    "limit": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
}
_OTHERS = {
    ShardUnavailable: grpc.StatusCode.UNAVAILABLE,
    ShardBroken: grpc.StatusCode.DATA_LOSS,
    CheckpointError: grpc.StatusCode.ABORTED,
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
}
_seldom = LogThrottle()


@contextmanager
def answering(context: Any, count: Callable[[str], object]) -> Iterator[None]:
    """Turns errors into gRPC statuses, and counts them by name."""
    try:
        yield
    except ShardRefused as exc:
        count(f"refused_{exc.reason}")
        if times := _seldom.allow(exc.reason):
            logger.warning("%d requests refused: %s", times, exc)
        context.abort(_REFUSALS[exc.reason], str(exc))
    except StreamtrainError as exc:
        kind = next((kind for kind in _OTHERS if isinstance(exc, kind)), None)
        count(f"failed_{type(exc).__name__}")
        if isinstance(exc, ShardBroken) and _seldom.allow(ShardBroken):
            logger.error("%s", exc)
        context.abort(_OTHERS[kind] if kind else grpc.StatusCode.INTERNAL, str(exc))
    except (grpc.RpcError, GeneratorExit):  # while it was awaited, or while it was answered
        count("broken_sessions")  # the client is gone
        raise
    except Exception as exc:  # of ours: gRPC logs it and answers UNKNOWN, upon which clients connect again
        count(f"failed_{type(exc).__name__}")
        raise


def parse_request(kind: Any, requests: Iterator[bytes]) -> Any:
    """The one request of a unary call, a message of `kind`.

    Raises:
        ShardRefused: there is none, or its bytes are damaged.
    """
    try:
        return kind.FromString(next(requests))
    except StopIteration as exc:
        raise ShardRefused("the call ends without a request") from exc
    except DecodeError as exc:
        raise ShardRefused(f"the request is not a {kind.DESCRIPTOR.name}: {exc}") from exc


def service_handler(
    service: ServiceDescriptor,
    servicer: object,
    count: Callable[[str], object],
    reading: Callable[[Any], AbstractContextManager[object]] = nullcontext,
) -> grpc.GenericRpcHandler:
    """The handler of a gRPC service.

    A unary method is answered by `servicer.method_name(request)`; streams by `servicer.method_name(messages, context)`,
    with messages as raw bytes.

    Args:
        service: descriptor of the service.
        servicer: has the methods, named in snake case.
        count: called with the name of each error, as `answering` does.
        reading: given the context of a unary call, is held while its request is awaited.
    """

    def handler(method: Any) -> Any:
        answer = getattr(servicer, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower())
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(answer)
        kind = GetMessageClass(method.input_type)

        def handle(requests: Iterator[bytes], context: Any) -> Any:
            with answering(context, count):
                with reading(context):
                    request = parse_request(kind, requests)
                return answer(request)

        # On the wire a unary call is the same as a stream of requests. But gRPC waits for the request of a unary call
        # for as long as the call lasts, and so gives its thread to any client that sends nothing.
        return grpc.stream_unary_rpc_method_handler(
            handle, response_serializer=lambda message: message.SerializeToString()
        )

    return grpc.method_handlers_generic_handler(
        service.full_name, {method.name: handler(method) for method in service.methods}
    )


def server_options(message_bytes: int) -> list[tuple[str, Any]]:
    """Options of a gRPC server. Dead connections are noticed within seconds, as others may wait for their workers."""
    return [
        # Ours is the limit that names and counts; gRPC's is for what would not fit into memory.
        ("grpc.max_receive_message_length", min(2 * message_bytes, 2**31 - 1)),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.lookahead_bytes", 4 << 20),
        ("grpc.so_reuseport", 0),
    ]
