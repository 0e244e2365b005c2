"""Server: a node behind gRPC."""

from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

import streamtrain.ps.ps_pb2 as pb
from streamtrain.ps import wire
from streamtrain.ps.answering import unary
from streamtrain.ps.node import Node
from streamtrain.ps.servicer import Servicer
from streamtrain.ps.sessions import Limits, Sessions

_CONTROL_THREADS = 6  # two of them for the streams of a primary to its backup, of which one may be dying


class Server:
    """Serves a node until it is stopped.

    Args:
        node: what is served.
        limits: what is taken of clients.
        interceptors: of gRPC, such as one that authenticates.
    """

    def __init__(
        self, node: Node, limits: Limits | None = None, interceptors: tuple[grpc.ServerInterceptor, ...] = ()
    ) -> None:
        self.limits = limits or Limits()
        self.grpc = grpc.server(
            futures.ThreadPoolExecutor(self.limits.sessions + _CONTROL_THREADS, "ps"),
            interceptors=interceptors,
            options=server_options(self.limits.message_bytes),
        )
        self._sessions = Sessions(self.limits, node.count)
        self.grpc.add_generic_rpc_handlers((_handlers(Servicer(node, self.limits, self._sessions)),))

    def workers(self) -> list[str]:
        """Names of the workers that have joined."""
        return self._sessions.workers()

    def start(self) -> None:
        """Begins to serve, on the ports that were added to `grpc`."""
        self.grpc.start()
        self._sessions.start()

    def stop(self, grace: float = 1.0) -> None:
        """Ends all sessions and stops."""
        self._sessions.stop()
        self.grpc.stop(grace).wait()


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


def _handlers(servicer: Servicer) -> grpc.GenericRpcHandler:
    def asked(method: Callable[..., Any], request: Any) -> Any:
        return unary(lambda requests, context: method(servicer.asked(request, requests, context), context))

    return grpc.method_handlers_generic_handler(
        wire.SERVICE,
        {
            "Session": grpc.stream_stream_rpc_method_handler(servicer.session),
            "Status": asked(servicer.status, pb.StatusRequest),
            "Initialise": asked(servicer.initialise, pb.InitialiseRequest),
            "Freeze": asked(servicer.freeze, pb.FreezeRequest),
            "Cut": asked(servicer.cut, pb.CutRequest),
            "Write": asked(servicer.write, pb.WriteRequest),
            "Publish": asked(servicer.publish, pb.PublishRequest),
            "Apply": asked(servicer.apply, pb.ApplyRequest),
            "Report": asked(servicer.report, pb.ReportRequest),
            "PublishNow": asked(servicer.publish_now, pb.PublishNowRequest),
            "Inspect": asked(servicer.inspect, pb.InspectRequest),
            "Verify": asked(servicer.verify, pb.VerifyRequest),
            "Sums": asked(servicer.sums, pb.SumsRequest),
            "Release": asked(servicer.release, pb.ReleaseRequest),
            "Follow": grpc.stream_stream_rpc_method_handler(servicer.follow),
            "Promote": asked(servicer.promote, pb.PromoteRequest),
            "Read": asked(servicer.read, pb.Request),
        },
    )
