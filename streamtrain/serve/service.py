"""Service: what all protocols share: which predictor, how many instances, how fresh, and what answers say of it."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from streamtrain.errors import StreamtrainError
from streamtrain.logs import Seldom
from streamtrain.serve.admission import Admission, Admitted, Overloaded
from streamtrain.serve.answers import RETRY_SECONDS, Refused, answer_refusal
from streamtrain.serve.batcher import Batcher
from streamtrain.serve.connection import Connections
from streamtrain.serve.follower import Follower
from streamtrain.serve.metrics import ServingMetrics
from streamtrain.serve.predictor import Predicted, Predictor
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.serve.selection import Selection
from streamtrain.serve.tokens import Tokens
from streamtrain.serve.watchdog import Watch, Watchdog

logger = logging.getLogger(__name__)

Choose = Callable[[], Predictor]


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        body: bytes of a body.
        instances: of a request.
        wait: seconds that it waits for what x-min-offset asks for.
        requests: for predictions, under way at once.
        bodies: bytes of the bodies of all of these.
    """

    body: int = 8 << 20
    instances: int = 4096
    wait: float = 5.0
    requests: int = 1024
    bodies: int = 256 << 20


class Service:
    """Answers requests for predictions of one model, from one event loop.

    Args:
        registry: of publications.
        follower: that keeps it up; None: nothing does.
        batcher: that predicts.
        limits: of requests.
        watch: what is watched for in predictions.
        tokens: who may do what.
        connections: what clients may take.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        registry: Registry,
        follower: Follower | None,
        batcher: Batcher,
        limits: Limits,
        watch: Watch,
        *,
        tokens: Tokens,
        connections: Connections,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.registry = registry
        self.follower = follower
        self.selection = follower.selection if follower else Selection(registry)
        self.batcher = batcher
        self.limits = limits
        self.tokens, self.connections = tokens, connections
        self.admission = Admission(limits.requests, limits.bodies)
        labels = [label.name for label in registry.model.labels]
        self.watchdog = Watchdog(self.selection, watch, labels)
        self.metrics = ServingMetrics(self)
        self._now = now
        self._seldom = Seldom()
        self._changed = asyncio.Event()
        self._ending = False
        self._listener: Callable[[], object] = lambda: None
        self._reaction = threading.Thread()  # none yet

    def open(self) -> None:
        """Begins, in the event loop that serves."""
        loop = asyncio.get_running_loop()
        self._listener = lambda: loop.call_soon_threadsafe(self._tell)
        self.registry.listen(self._listener)

    async def begun(self, seconds: float) -> None:
        """Waits until something is served, for at most so long, or until it is to end."""
        deadline = time.monotonic() + seconds
        while self.registry.served is None and not self._ending and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, threading.TIMEOUT_MAX))

    def end(self) -> None:
        """It will be closed soon; called by any thread."""
        self._ending = True
        self._listener()

    def close(self) -> None:
        """Ends, before the event loop does."""
        self.registry.unlisten(self._listener)
        self._listener = lambda: None
        self.batcher.close()

    def check_name(self, name: str) -> None:
        """Refuses another model than the one that is served."""
        if name != self.registry.model.name:
            raise Refused(404, f"there is no model {name!r}; the model is {self.registry.model.name!r}")

    def chosen(self, name: str, version: str | None = None, label: str | None = None) -> Choose:
        """Finds the predictor of a model's version or label, or the served one, now and whenever it is called again.

        Raises:
            Refused: 404, there is no such; 503, nothing is loaded yet.
        """
        self.check_name(name)
        if label is not None:
            return lambda: self._loaded(self.registry.find_label(label), f"label {label!r}")
        if version is not None:
            number = version_of(version)
            return lambda: self._loaded(self.registry.find(number), f"version {version}")
        return self._served

    def _served(self) -> Predictor:
        served = self.registry.served
        if served is None:
            trouble = self.follower.trouble if self.follower else ""
            why = f": {trouble}" if trouble else ""
            raise Refused(503, f"nothing is loaded yet{why}", {"retry-after": RETRY_SECONDS})
        return served

    def _loaded(self, found: Predictor | None, what: str) -> Predictor:
        if found is None:
            loaded = ", ".join(str(one) for one in self.registry.resident) or "nothing"
            raise Refused(404, f"{what} is not loaded; loaded: {loaded}")
        return found

    def refusal(self, exc: StreamtrainError) -> Response:
        """The answer to a request for predictions that cannot be answered."""
        if isinstance(exc, Overloaded):
            self.admission.count(exc)
        return answer_refusal(exc)

    async def body(self, request: Request, admitted: Admitted | None = None) -> bytes:
        """The body of a request.

        Args:
            request: whose.
            admitted: it as one of those under way; None: it is of control.

        Raises:
            Refused: it is too large, compressed, or did not come.
            Overloaded: those of all requests are too large.
        """
        headers = request.headers
        if headers.get("content-encoding", "identity") != "identity":
            raise Refused(400, f"content-encoding {headers['content-encoding']!r} is not supported; send it plain")
        size, chunks = 0, []
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= self.limits.body:
                    if admitted is not None:
                        admitted.take(len(chunk))
                    chunks.append(chunk)
                elif size > 16 * self.limits.body:
                    break  # whoever has sent less than this gets to read why it is refused
        except ClientDisconnect as exc:
            raise Refused(408, "the client went away before its request had come") from exc
        if size > self.limits.body:
            raise Refused(413, f"a body may have {self.limits.body} bytes")
        return b"".join(chunks)

    async def predict(
        self, choose: Choose, messages: Sequence[bytes], headers: Mapping[str, str], began: float
    ) -> tuple[Predicted, dict[str, str]]:
        """Predicts instances: what came of them, and the headers of the answer.

        Args:
            choose: what predicts.
            messages: the instances, as JSON.
            headers: of the request.
            began: when it came, by `time.perf_counter`.

        Raises:
            Refused: too many instances, or 412.
            Overloaded, SampleError: as of `Batcher.predict`.
        """
        if len(messages) > self.limits.instances:
            raise Refused(413, f"a request may have {self.limits.instances} instances, not {len(messages)}")
        wanted = headers.get("x-min-offset")
        predictor = choose() if wanted is None else await self._learned(choose, offsets_of(wanted))
        predicted = await self.batcher.predict(predictor, messages)
        is_finite = bool(np.isfinite(predicted.predictions).all())
        if predictor is self.registry.served:
            self._watch(predictor, predicted, is_finite)
        if not is_finite:
            at = int(np.flatnonzero(~np.isfinite(predicted.predictions).all(axis=1))[0])
            raise Refused(400, f"instance {at}: its prediction is not finite; are its numbers out of the usual range?")
        self.metrics.predicted(predictor.name, time.perf_counter() - began)
        publication = predicted.publication
        about = {"x-model-version": predictor.name, "x-publication": str(publication.number)}
        if publication.watermark:
            about["x-trained-through"] = predictor.trained_through(publication)
            about["x-freshness-ms"] = str(max(0, round(1000 * (self._now() - publication.watermark))))
        return predicted, about

    def _watch(self, predictor: Predictor, predicted: Predicted, is_finite: bool) -> None:
        version: Version = HEAD if predictor.name == HEAD else int(predictor.name)
        fault = self.watchdog.observe(version, predicted, is_finite)
        if fault is not None and not self._reaction.is_alive():
            self._reaction = threading.Thread(target=self.watchdog.react, args=(fault,), name="watchdog")
            self._reaction.start()

    async def _learned(self, choose: Choose, offsets: Mapping[int, int]) -> Predictor:
        """What predicts, once it has learned the samples at offsets, by partition."""
        deadline = time.monotonic() + self.limits.wait
        while True:
            changed, predictor = self._changed, choose()
            clock = predictor.publication.clock
            if all(clock.get(partition, 0) > offset for partition, offset in offsets.items()):
                return predictor
            self.admission.wait()
            try:
                await asyncio.wait_for(changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                at = ",".join(f"{partition}:{offset}" for partition, offset in sorted(clock.items())) or "nowhere"
                message = f"x-min-offset: not learned within {self.limits.wait:g} s; the next to be learned are at {at}"
                if times := self._seldom.due():
                    logger.warning("%d requests waited in vain for offsets: %s", times, message)
                raise Refused(412, message) from None
            finally:
                self.admission.waiting -= 1

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def origin_state(self) -> str:
        """How it is with where publications come from, in a few words."""
        if self.follower is None:
            return "not followed"
        stale = self.follower.stale_seconds
        return f"away for {stale:.0f} s: {self.follower.trouble}" if stale > 1 else self.follower.trouble or "ok"


def version_of(text: str) -> Version:
    """A version as it stands in a path: its number, or 0 or "head" for the head.

    Raises:
        Refused: 404, it is neither.
    """
    if text in ("0", HEAD):
        return HEAD
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    raise Refused(404, f'there is no version {text!r}; versions are numbers, or "head"')


def offsets_of(header: str) -> dict[int, int]:
    """Offsets by partition, of a header "0:17,1:4".

    Raises:
        Refused: 400, it is none.
    """
    try:
        pairs = [part.split(":") for part in header.split(",")]
        return {int(partition): int(offset) for partition, offset in pairs}
    except ValueError:
        message = f'x-min-offset must be "partition:offset", with commas between several, not {header!r}'
        raise Refused(400, message) from None
