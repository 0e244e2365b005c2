"""The search: heats of candidates that learn the same samples side by side.

A heat is a race between the combinations of a few settings; race.py defines which candidates are dropped when. The best
finisher is where the next heat starts if it is better by more than one standard error; otherwise settings stay.

The result depends on model, samples and options only, unless time or memory run out, which is reported.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

from streamtrain.errors import ConfigError
from streamtrain.model.bad_samples import BadSampleGuard, Refusals
from streamtrain.model.model import Model
from streamtrain.model.samples import FUTURE_AFTER, SampleReader
from streamtrain.train.micro import GraphCache
from streamtrain.tuning.candidate import CHUNK, Candidate, Decoded, Losses, Mean
from streamtrain.tuning.compare import Difference
from streamtrain.tuning.race import Race, compare_losses, later_half, rungs, score
from streamtrain.tuning.space import HEATS, Heat, extend_heat, key, trials

ALIVE = 16  # candidates that learn side by side at most
ROUNDS = 3  # passes through all heats at most
_READING = 20  # the model as given learns for 1/20 of the time: a search takes some 30 passes over the samples
_COST = 0.3  # passes that a candidate of a heat takes on average; the winner takes a whole pass more
_SPARE = 1.5  # reserve, as a factor of the time to learn with another seed: a graph may be compiled meanwhile
_EXTENSIONS = 2  # times that a heat is extended if the best rate is an outermost one


class _TimeUp(Exception):
    """The time limit is reached."""


class Search:
    """Searches settings with which a model predicts a stream better.

    Args:
        model: the model as given.
        batch_size: samples that candidates pull at once, and learn in one step if `micro_batch_size` is None.
        label: label to judge candidates by; None: the model's total loss.
        minutes: time limit.
        megabytes: memory limit of decoded samples (at most half of it), rows and predictions.
        without: settings to leave unchanged.
        heats: values to vary settings by.
        clock: seconds.
        on_progress: called regularly during the search.

    Attributes:
        settings: names of all settings in `heats`.
        given: candidate of the model as given.
        best: best candidate so far; None: not even the loss of the model as given is finite.
        tried: all candidates except `given`, in order.
        decoded: the samples.
        bad: samples refused, by reason.
        heat: settings being varied; "" before the first heat.
        cut: why the file was not read to its end; "": it was.
        ended: why the search ended early; "": it completed.
        varied: settings that were varied.
        skipped: why a setting was not varied, by setting; or not varied again.
        confirmed: difference of best and given with another seed; None: not measured.

    Raises:
        ConfigError: an option is wrong, or the model's graph is.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int = 1024,
        label: str | None = None,
        minutes: float = 5.0,
        megabytes: float = 2048.0,
        without: Sequence[str] = (),
        heats: Sequence[Heat] = HEATS,
        clock: Callable[[], float] = time.monotonic,
        on_progress: Callable[["Search"], None] = lambda search: None,
    ) -> None:
        names = [label.name for label in model.labels]
        if label is not None and label not in names:
            raise ConfigError(f"unknown label {label!r}; the labels are {names}")
        self.settings = list(dict.fromkeys(chain.from_iterable(heats)))
        if unknown := [name for name in without if name not in self.settings]:
            raise ConfigError(f"unknown setting {unknown[0]!r}; settings are: {', '.join(self.settings)}")
        for option, value in (("minutes", minutes), ("megabytes", megabytes)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{option} must be a finite number > 0, not {value!r}")
        self.label, self.seconds = label, minutes * 60
        self.judged = [j for j, name in enumerate(names) if label in (None, name)]
        self._most_bytes, self._clock, self._on_progress = megabytes * 1e6, clock, on_progress
        self._started = clock()
        losses = Losses(model, self.judged)
        self._make = partial(Candidate, losses=losses, batch_size=batch_size, graphs=GraphCache(), clock=clock)
        self._batch_size = batch_size
        self._heats, self._without = heats, {*without}
        self.decoded = Decoded(model, self.judged)
        self.given = self._make(model)
        self.given.start()
        self.mean = Mean(losses, names)
        self.best: Candidate | None = None
        self.tried: list[Candidate] = []
        self.bad: dict[str, int] = {}
        self._running: Race | None = None
        self.heat = self.cut = self.ended = ""
        self.varied: set[str] = set()
        self.skipped: dict[str, str] = {name: "excluded by request" for name in without}
        self.confirmed: Difference | None = None
        if not model.keras.trainable_variables:
            for name in {"dense_rate", "dense_optimizer"} & {*self.settings}:
                self._without.add(name)
                self.skipped[name] = "the graph has no weights"

    @property
    def alive(self) -> list[Candidate]:
        """Candidates of the current race."""
        return self._running.alive if self._running else []

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return self._clock() - self._started

    @property
    def remaining(self) -> float:
        """Seconds until the time limit."""
        return max(0.0, self.seconds - self.elapsed)

    @property
    def for_heats(self) -> float:
        """Seconds left for heats, as best and given are learned once more at the end."""
        is_other = self.best is not None and self.best is not self.given
        again = _SPARE * self._again if is_other else 0.0
        return self.remaining - (again if again < self.seconds / 4 else 0.0)

    @property
    def _again(self) -> float:
        """Seconds to learn best and given with another seed; both are compiled anew."""
        assert self.best is not None
        return self.given.seconds + max(self.best.seconds, self.given.seconds)

    @property
    def chunks(self) -> int:
        """Number of chunks that the model as given has learned, which are those of the search."""
        return self.given.chunks

    @property
    def half(self) -> int:
        """First chunk of the later half, which candidates are judged by at the end."""
        return later_half(rungs(self.chunks))

    def read(
        self,
        messages: Iterable[bytes],
        *,
        place: Callable[[int], str] = lambda index: f"sample {index}",
        max_bad_ratio: float = 0.1,
    ) -> None:
        """Decodes samples and has the model as given learn them, until they end or a limit is reached.

        Args:
            messages: the samples.
            place: where a sample stands, by its index.
            max_bad_ratio: share of refused samples, over 10,000, above which the search fails.

        Raises:
            TooManyBadSamples: too many samples were refused.
            ConfigError: there are no samples, or none has the label.
        """
        reader = SampleReader(self.given.model, future_after=FUTURE_AFTER)
        guard, started = BadSampleGuard(max_bad_ratio), self._clock()
        size = -(-CHUNK // self._batch_size) * self._batch_size
        for batch, bad in reader.batches(messages, size):
            for sample in bad:
                self.bad[sample.reason] = self.bad.get(sample.reason, 0) + 1
            last = f"{place(bad[-1].index)}: {bad[-1].describe()}" if bad else ""
            guard.judge({0: Refusals(len(batch) + len(bad), len(bad))}, bad, last)
            if not len(batch):
                continue
            chunk = self.decoded.add(batch)
            self.mean.add(chunk)
            if self.given.ended:
                self.given.chunks += 1
            else:
                self.given.learn(chunk)
            self._on_progress(self)
            if self.decoded.nbytes + self.given.nbytes > self._most_bytes / 2:
                self.cut = "decoded samples use half of the memory limit"
            elif self._clock() - started > self.seconds / _READING:
                self.cut = f"the model as given learns no more in 1/{_READING} of the time limit"
            if self.cut:
                break
        else:
            guard.finish()
        if not self.chunks:
            raise ConfigError(f"there are no samples{f', only refused ones: {self.bad}' if self.bad else ''}")
        if not self.decoded.weights(0, self.chunks).any():
            raise ConfigError(f"no sample has the label {self.label or ''}".rstrip() + ", or all weights are 0")
        if not self.given.ended:
            self.given.finish()
            self.best = self.given

    def run(self) -> None:
        """Runs all heats, and again while that finds something better, until the time limit."""
        try:
            for _ in range(ROUNDS):
                before = self.best
                for heat in self._heats:
                    self._run(heat)
                if self.best is before:
                    break
        except _TimeUp:
            self.ended = "the time limit was reached"
        finally:
            for candidate in self.alive:
                candidate.drop(self.ended or "the search was interrupted")
            self._running = None
        with suppress(_TimeUp):
            self._confirm()

    def difference(self, ours: Candidate | Mean, theirs: Candidate | Mean) -> Difference:
        """Difference of two finishers over the later half of the samples."""
        return compare_losses(self.decoded, ours, theirs, self.half, self.chunks)

    def leaders(self) -> list[Candidate]:
        """The best few finishers, the very best first; their predictions are kept."""
        finishers = [c for c in self.tried if not c.ended and c.chunks == self.chunks and c not in self.alive]
        finishers.sort(key=lambda candidate: score(self.decoded, candidate, self.half, self.chunks))
        best = [self.best] if self.best else []
        return [*best, *(candidate for candidate in finishers[:3] if candidate not in best)]

    def _run(self, heat: Heat) -> None:
        """Runs a heat, and extends it while the best rate is an outermost one."""
        heat = {name: values for name, values in heat.items() if name not in self._without}
        for _ in range(1 + _EXTENSIONS):
            base = self.best or self.given
            known = {key(candidate.model) for candidate in [self.given, *self.tried]}
            new = {key(model): model for model in trials(heat, base.model) if key(model) not in known} if heat else {}
            if not new:
                for name in heat:
                    self.skipped.setdefault(name, "no value changes this model")
                return
            self.heat = ", ".join(heat)
            if base.seconds > self.for_heats:
                raise _TimeUp
            self.varied |= {*heat}
            queue = [*new.values()]
            for first in range(0, len(queue), ALIVE):
                self._race(queue[first : first + ALIVE])
            if self.best is None or self.best is base:
                return
            extended = extend_heat(heat, base.model, self.best.model)
            if extended is None:
                return
            heat = extended

    def _race(self, queue: Sequence[Model]) -> None:
        base = self.best or self.given
        fitting = (self.for_heats / base.seconds - 1) / _COST if base.seconds else math.inf
        others = self.decoded.nbytes + sum(candidate.nbytes for candidate in [self.given, *self.tried])
        self._running = race = Race(
            self.decoded,
            self.chunks,
            rival=self.best,
            remaining=lambda: self.for_heats,
            budget=lambda: self._most_bytes - others,
            on_step=self._step,
        )
        for place, model in enumerate(queue):
            candidate = self._make(model)
            self.tried.append(candidate)
            if place and place >= fitting:
                candidate.drop("no time to start")
                continue
            try:
                candidate.start()
            except ConfigError as exc:
                candidate.drop(" ".join(str(exc).split())[:200])
            else:
                race.alive.append(candidate)
            self._step()
        for winner in race.run()[:1]:
            loss = self.difference(winner, self.best) if self.best else Difference(-math.inf, 0.0, 0)
            if loss.mean < -loss.error:
                self.best = winner
        for candidate in {*self.tried} - {*self.leaders()}:
            candidate.forget_predictions()

    def _step(self) -> None:
        self._on_progress(self)
        if (self.for_heats if self.alive else self.remaining) <= 0:
            raise _TimeUp

    def _confirm(self) -> None:
        """Learns best and given once more with another seed, as their difference may be one of seeds."""
        both: list[Candidate] = []
        if self.best is None or self.best is self.given or self.given.ended:
            return
        if self._again > self.remaining:
            return
        self.heat = "another seed"
        for model in (self.best.model, self.given.model):
            candidate = self._make(model.replace(seed=model.seed + 1))
            candidate.start()
            for chunk in self.decoded.chunks[: self.chunks]:
                candidate.learn(chunk)
                self._step()
            both.append(candidate)
        if not any(candidate.ended for candidate in both):
            self.confirmed = self.difference(*both)
