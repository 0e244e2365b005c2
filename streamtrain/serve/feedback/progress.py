"""How far outcomes are joined, and which samples have come of them: what the join keeps in Redis."""

import asyncio
import json
from typing import NamedTuple

from streamtrain.errors import PublicationCorrupt
from streamtrain.serve.errors import HTTPError
from streamtrain.store.redis.model import RedisModel

OUTCOMES = "outcomes:"
"""Before the partition and offset of an outcome, as in x-min-offset."""


class AwaitedOffsets(NamedTuple):
    """Offsets that are waited for, by partition: of samples, and of outcomes."""

    samples: dict[int, int]
    outcomes: dict[int, int]


def parse_offsets(header: str) -> AwaitedOffsets:
    """The offsets of a header such as "0:17,1:4,outcomes:0:3"; of several of a partition the last.

    Raises:
        HTTPError: 400, it is malformed.
    """
    offsets = AwaitedOffsets({}, {})
    try:
        for part in header.split(","):
            of = part.strip()
            is_outcome = of.startswith(OUTCOMES)
            partition, offset = of.removeprefix(OUTCOMES).split(":")
            chosen = offsets.outcomes if is_outcome else offsets.samples
            chosen[int(partition)] = max(int(offset), chosen.get(int(partition), int(offset)))
    except ValueError:
        message = (
            'x-min-offset must be a list of "partition:offset" or "outcomes:partition:offset", separated by commas, '
            f"not {header!r}"
        )
        raise HTTPError(400, message) from None
    return offsets


class Joined(NamedTuple):
    """How far a partition is joined: next offset of its outcomes, and of the samples made so far."""

    outcome: int
    sample: int


class JoinProgress:
    """Reads the progress of the join of a model. All calls come from one event loop; they share a read.

    Args:
        model: whose samples are joined.
    """

    def __init__(self, model: RedisModel) -> None:
        self._model = model
        self._reading: asyncio.Task[dict[int, Joined]] | None = None

    async def read(self) -> dict[int, Joined]:
        """How far each partition is joined.

        Raises:
            OriginUnavailable: Redis does not answer.
            PublicationError: it refuses to, or an entry is damaged.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(asyncio.to_thread(self._read))
        return await asyncio.shield(self._reading)

    def _read(self) -> dict[int, Joined]:
        reply = self._model.server.call("HGETALL", self._model.keys.join)
        flat = [part for pair in reply.items() for part in pair] if isinstance(reply, dict) else reply
        try:
            return {int(name): Joined(**json.loads(text)) for name, text in zip(flat[::2], flat[1::2], strict=True)}
        except (ValueError, TypeError) as exc:
            raise PublicationCorrupt(f"{self._model.name}: the progress of the join is damaged: {exc}") from exc
