"""Comparison of a served model with others that learn from the same topic, such as its forks."""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import Meta, Struct
from starlette.routing import BaseRoute

from streamtrain.errors import NothingToCompare
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.http.responses import documented
from streamtrain.serve.service.service import Service

_POINTS = 200  # of a course: about as many as a chart of the console has room for
_LEAST_SECONDS = 2.0
_SHARE = 0.05  # of the time may be spent on one comparison, as it is taken from predictions
_MOST_KEPT = 64  # answers


class Others(Struct):
    """What a model can be compared with."""

    model: Annotated[str, Meta(description="Name under which it is published.")]
    others: Annotated[list[str], Meta(description="Names of the other models that learn from the same topic.")]


class Compared(Struct):
    """The JSON of `streamtrain compare --json`, see docs/compare.md."""

    a: str
    b: str
    blocks: int
    from_: float = msgspec.field(name="from")
    to: float
    dropped: bool
    results: Annotated[
        list[dict[str, Any]],
        Meta(description="By label and slice; `course` has the interval after the first 16 blocks and more and more."),
    ]


BODIES = (Others, Compared)


class ComparisonView(Protocol):
    """What is known of how well models predict. Thread-safe. Calls block; they may raise StreamtrainError."""

    def others(self, model: str) -> list[str]:
        """Names of the models that can be compared with a published model."""

    def compare(
        self, model: str, other: str, *, label: str | None, slice_of: str | None, last: str | None, points: int
    ) -> dict[str, Any]:
        """`Compared` as JSON, with at most `points` points in each course; may raise ConfigError, NothingToCompare."""


class RecentAnswers:
    """Answers that take long, one at a time: each is kept until it has taken a twentieth of the time at most.

    All calls come from one event loop.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str | None, ...], asyncio.Task[bytes]] = {}
        self._until: dict[tuple[str | None, ...], float] = {}
        self._turn = asyncio.Semaphore(1)

    async def get(self, key: tuple[str | None, ...], read: Callable[[], object]) -> bytes:
        """The answer for a key as JSON, or what `read` raises; both are kept."""
        task = self._kept.get(key)
        if task is None or (task.done() and time.monotonic() >= self._until.get(key, 0.0)):
            self._forget()
            task = self._kept[key] = asyncio.create_task(self._read(key, read))
        return await asyncio.shield(task)  # a client that disconnects does not cancel it for the others

    async def _read(self, key: tuple[str | None, ...], read: Callable[[], object]) -> bytes:
        async with self._turn:
            began = time.monotonic()
            try:
                return await asyncio.to_thread(lambda: msgspec.json.encode(read()))
            finally:
                now = time.monotonic()
                self._until[key] = now + max(_LEAST_SECONDS, (now - began) / _SHARE)

    def _forget(self) -> None:
        """Those that are out of date; if that is not enough, the oldest ones."""
        now = time.monotonic()
        done = [key for key, task in self._kept.items() if task.done()]
        old = [key for key in done if self._until.get(key, 0.0) <= now]
        for key in old or done[: len(self._kept) - _MOST_KEPT]:
            del self._kept[key]
            self._until.pop(key, None)


def routes(service: Service, view: ComparisonView | None) -> list[BaseRoute]:
    """The routes; 404 without a view."""
    api = APIRouter(tags=["console"])
    recent = RecentAnswers()

    def find(name: str) -> tuple[ComparisonView, str]:
        model = service.find(name)
        if view is None:
            raise HTTPError(404, "there is no Redis to which workers write the figures of models: set publish.url")
        return view, model.published

    @api.get(
        "/v1/models/{name}/compare",
        summary="Models that it can be compared with",
        responses=documented(Others, 404, 503),
    )
    async def others(name: str) -> Response:
        known, model = find(name)
        body = await recent.get((model,), lambda: Others(model, known.others(model)))
        return Response(body, media_type="application/json")

    @api.get(
        "/v1/models/{name}/compare/{other:path}",
        summary="Whether it or another model predicts better",
        responses=documented(Compared, 400, 404, 503),
    )
    async def compare(
        name: str, other: str, label: str | None = None, slice: str | None = None, last: str | None = None
    ) -> Response:
        known, model = find(name)
        try:
            body = await recent.get(
                (model, other, label, slice, last),
                lambda: known.compare(model, other, label=label, slice_of=slice, last=last, points=_POINTS),
            )
        except NothingToCompare as exc:
            raise HTTPError(404, str(exc)) from exc
        return Response(body, media_type="application/json")

    return [*api.routes]
