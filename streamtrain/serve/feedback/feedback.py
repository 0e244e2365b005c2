"""What a server reports about its predictions, and the outcomes that are reported to it."""

import asyncio
import time
from dataclasses import dataclass

from streamtrain.errors import OriginUnavailable
from streamtrain.metrics.serving import FeedbackState
from streamtrain.serve.feedback.impressions import ImpressionLog
from streamtrain.serve.feedback.outcomes import OutcomeWriter
from streamtrain.serve.feedback.progress import Joined, JoinProgress, Offsets
from streamtrain.serve.http.responses import HTTPError

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Feedback:
    """The feedback of a server.

    Attributes:
        impressions: what was predicted; None: it is not written.
        outcomes: what became of it; None: the server does not take it.
        progress: how far outcomes are joined; None: that is not known.
    """

    impressions: ImpressionLog | None = None
    outcomes: OutcomeWriter | None = None
    progress: JoinProgress | None = None

    async def wait_joined(self, wanted: Offsets, deadline: float, timeout: float) -> dict[int, int]:
        """The offsets of samples to wait for, once the outcomes are joined.

        Args:
            wanted: offsets of samples and of outcomes.
            deadline: by the monotonic clock.
            timeout: seconds until then, for the message.

        Raises:
            HTTPError: 400, there is no join; 412, they are not joined by then.
            PublicationError: see `JoinProgress.read`.
        """
        if self.progress is None:
            raise HTTPError(400, "x-min-offset: outcomes cannot be waited for: set publish.url and join.outcomes")
        joined: dict[int, Joined] = {}
        trouble = ""
        while True:
            try:
                joined = await self.progress.read()
            except OriginUnavailable as exc:
                trouble = f" ({exc})"
            if all(p in joined and offset < joined[p].outcome for p, offset in wanted.outcomes.items()):
                return self._samples(wanted, joined)
            if time.monotonic() > deadline:
                at = ",".join(f"{p}:{one.outcome}" for p, one in sorted(joined.items())) or "none"
                raise HTTPError(
                    412,
                    f"x-min-offset: outcomes not joined within {timeout:g} s; the next offsets to be joined are {at}"
                    f"{trouble}",
                )
            await asyncio.sleep(_POLL_SECONDS)

    @staticmethod
    def _samples(wanted: Offsets, joined: dict[int, Joined]) -> dict[int, int]:
        samples = dict(wanted.samples)
        for partition in wanted.outcomes:
            if (last := joined[partition].sample - 1) >= 0:
                samples[partition] = max(last, samples.get(partition, 0))
        return samples

    def state(self) -> FeedbackState:
        """For the metrics."""
        log, outcomes = self.impressions, self.outcomes
        return FeedbackState(
            impressions=log.counts if log else {},
            waiting=log.waiting if log else 0,
            outcomes=dict(outcomes.counts) if outcomes else {},
        )

    def start(self) -> None:
        """Begins to write, and to take outcomes."""
        if self.impressions is not None:
            self.impressions.start()
        if self.outcomes is not None:
            self.outcomes.start()

    def close(self) -> None:
        """Writes what waits, for a few seconds at most."""
        if self.impressions is not None:
            self.impressions.close()
        if self.outcomes is not None:
            self.outcomes.close()
