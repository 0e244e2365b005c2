"""Answering: unary calls of gRPC, and what errors are on the wire."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from streamtrain.errors import (
    CheckpointError,
    ConfigError,
    ShardBroken,
    ShardRefused,
    ShardUnavailable,
    StreamtrainError,
)
from streamtrain.logs import Seldom

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

_seldom = Seldom()


@contextmanager
def answering(context: Any, count: Callable[[str], object]) -> Iterator[None]:
    """Turns errors into gRPC statuses, and counts them by name."""
    try:
        yield
    except ShardRefused as exc:
        count(f"refused_{exc.reason}")
        if times := _seldom.due(exc.reason):
            logger.warning("%d requests refused: %s", times, exc)
        context.abort(_REFUSALS[exc.reason], str(exc))
    except StreamtrainError as exc:
        kind = next((kind for kind in _OTHERS if isinstance(exc, kind)), None)
        count(f"failed_{type(exc).__name__}")
        if isinstance(exc, ShardBroken) and _seldom.due(ShardBroken):
            logger.error("%s", exc)
        context.abort(_OTHERS[kind] if kind else grpc.StatusCode.INTERNAL, str(exc))
    except (grpc.RpcError, GeneratorExit):  # while it was awaited, or while it was answered
        count("broken_sessions")  # the client is gone
        raise
    except Exception as exc:  # of ours: gRPC logs it and answers UNKNOWN, upon which clients connect again
        count(f"failed_{type(exc).__name__}")
        raise


def request_of(kind: Any, requests: Iterator[bytes]) -> Any:
    """The one request of a call, a message of `kind`.

    Raises:
        ShardRefused: there is none, or it is none.
    """
    try:
        return kind.FromString(next(requests))
    except StopIteration as exc:
        raise ShardRefused("the call ends without a request") from exc
    except DecodeError as exc:
        raise ShardRefused(f"the request is no {kind.DESCRIPTOR.name}: {exc}") from exc


def unary(answer: Callable[[Iterator[bytes], Any], Any]) -> Any:
    """The handler of a call with one request and one answer.

    On the wire it is the same as a stream of requests. But gRPC waits for the request of a unary call for as long as
    the call lasts, and so gives its thread to any client that says nothing.
    """
    return grpc.stream_unary_rpc_method_handler(answer, response_serializer=lambda message: message.SerializeToString())
