"""A model of how a cluster goes on with other shards: all states of a small one, and what must hold in each of them.

Shards, a worker and a coordinator take steps in any order. Pushes to the shards of one batch arrive one by one, any
process is killed and starts again at any moment, also with settings of before, and shards that hold pushes back let
them through whenever they like. What the protocol rests on can be left out, to see that the model finds out.

A batch is a number; batch n has the keys n % KEYS and (n + 1) % KEYS. Rows count batches.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

KEYS = 3


class Place(NamedTuple):
    """Which part of the keys a shard has."""

    slot: int
    shards: int

    def has(self, key: int) -> bool:
        return key % self.shards == self.slot


class Shard(NamedTuple):
    """A process that may hold a shard.

    Attributes:
        place: that it has; None: it is a spare.
        epoch: of the map by which it has it; 0: by its settings.
        clock: batches that it has learned.
        rows: how often each key was learned; 0 of keys of others.
        holds: whether it holds pushes back.
    """

    place: Place | None = None
    epoch: int = 0
    clock: int = 0
    rows: tuple[int, ...] = (0,) * KEYS
    holds: bool = False


class Worker(NamedTuple):
    """What learns batches.

    Attributes:
        map: the number of the map that it goes by.
        batch: that it learns; None: it has to ask shards where to begin.
        pushed: shards of the map that have acknowledged it.
    """

    map: int = 0
    batch: int | None = None
    pushed: frozenset[int] = frozenset()


class Coordinator(NamedTuple):
    """What tells the map.

    Attributes:
        map: its number.
        step: of a move: "", "cut" once the checkpoint is taken, "kept" once the next map is.
        told: shards that have their place from it.
    """

    map: int = 0
    step: str = ""
    told: frozenset[int] = frozenset()


class State(NamedTuple):
    """A moment of all of them.

    Attributes:
        maps: all that were kept, as numbers of `Model.maps`; the last one is in force, and its place here is its epoch.
        saved: the clock of the newest checkpoint, and its rows.
        crashes: that may still happen.
        moves: that may still begin.
    """

    shards: tuple[Shard, ...]
    worker: Worker
    coordinator: Coordinator
    maps: tuple[int, ...]
    saved: tuple[int, tuple[int, ...]]
    crashes: int
    moves: tuple[int, ...]


def rows_at(clock: int, place: Place | None) -> tuple[int, ...]:
    """What rows of a place count once so many batches are learned."""
    if place is None:
        return (0,) * KEYS
    return tuple(sum(key in _keys(n) for n in range(clock)) if place.has(key) else 0 for key in range(KEYS))


def _keys(batch: int) -> set[int]:
    return {batch % KEYS, (batch + 1) % KEYS}


@dataclass(frozen=True)
class Model:
    """A cluster.

    Args:
        maps: by number, the shards that have the keys, in order. The first one is that of the settings.
        batches: to be learned.
        moves: the maps to go to, one after another.
        crashes: how many processes may be killed.
        without: what is left out of the protocol.
    """

    maps: Sequence[tuple[int, ...]]
    batches: int
    moves: tuple[int, ...]
    crashes: int
    without: frozenset[str] = field(default_factory=frozenset)

    def first(self) -> State:
        count = 1 + max(shard for one in self.maps for shard in one)
        shards = tuple(Shard(self._place(0, shard)) for shard in range(count))
        return State(shards, Worker(), Coordinator(), (0,), (0, (0,) * KEYS), self.crashes, self.moves)

    def _place(self, number: int, shard: int) -> Place | None:
        of = self.maps[number]
        return Place(of.index(shard), len(of)) if shard in of else None

    def steps(self, s: State) -> Iterator[State]:
        """What may happen next."""
        yield from self._worker(s)
        yield from self._coordinate(s)
        yield from self._place_strays(s)
        for i, shard in enumerate(s.shards):
            if shard.holds and "release" not in self.without:
                yield _with(s, i, shard._replace(holds=False))
        if s.crashes:
            yield from self._crash(s._replace(crashes=s.crashes - 1))

    def _worker(self, s: State) -> Iterator[State]:
        w, mine = s.worker, self.maps[s.worker.map]
        if w.map != s.coordinator.map and "follow" not in self.without:
            yield s._replace(worker=Worker(s.coordinator.map))
        has_place = [s.shards[shard].place == self._place(w.map, shard) for shard in mine]
        if w.batch is None:
            if all(has_place):
                yield s._replace(worker=w._replace(batch=min(s.shards[shard].clock for shard in mine)))
            return
        if w.batch == self.batches:
            if any(s.shards[shard].clock < self.batches for shard in mine):  # which it is told as it connects again
                yield s._replace(worker=w._replace(batch=None))
            return
        for shard, is_right in zip(mine, has_place, strict=True):
            held = s.shards[shard]
            if held.holds or not (is_right or "place" in self.without) or held.place is None:
                continue
            if held.clock < w.batch:  # it was restored
                yield s._replace(worker=w._replace(batch=None, pushed=frozenset()))
            elif shard not in w.pushed:
                own = self._place(w.map, shard)
                new = held
                if held.clock == w.batch:
                    assert own is not None
                    learned = {key for key in _keys(w.batch) if own.has(key)}
                    rows = tuple(n + (key in learned) for key, n in enumerate(held.rows))
                    new = held._replace(clock=held.clock + 1, rows=rows)
                pushed = w.pushed | {shard}
                done = pushed == {*mine}
                next_ = w._replace(batch=w.batch + 1, pushed=frozenset()) if done else w._replace(pushed=pushed)
                yield _with(s, shard, new)._replace(worker=next_)

    def _coordinate(self, s: State) -> Iterator[State]:
        c = s.coordinator
        mine = [s.shards[shard] for shard in self.maps[c.map]]
        if not c.step and s.moves:
            places = [self._place(c.map, shard) for shard in self.maps[c.map]]
            aligned = len({one.clock for one in mine}) == 1 and [one.place for one in mine] == places
            if aligned or ("align" in self.without and [one.place for one in mine] == places):
                clock = max(one.clock for one in mine)
                rows = tuple(map(sum, zip(*(one.rows for one in mine), strict=True)))
                shards = tuple(
                    one._replace(holds=True) if shard in self.maps[c.map] else one for shard, one in enumerate(s.shards)
                )
                yield s._replace(shards=shards, saved=(clock, rows), coordinator=c._replace(step="cut"))
        elif c.step == "cut":
            yield s._replace(maps=(*s.maps, s.moves[0]), coordinator=c._replace(step="kept"))
        elif c.step == "kept":
            target = s.maps[-1]
            for shard in self.maps[target]:
                if s.shards[shard].epoch != len(s.maps) - 1:
                    yield _with(s, shard, self._placed(s, shard))
            # Also if one did not answer.
            yield s._replace(coordinator=Coordinator(target), moves=s.moves[1:])

    def _placed(self, s: State, shard: int) -> Shard:
        """A shard once it has its place in the map in force."""
        place, epoch, now = self._place(s.maps[-1], shard), len(s.maps) - 1, s.shards[shard]
        return now._replace(epoch=epoch, holds=False) if now.place == place else _restored(s, place, epoch)

    def _place_strays(self, s: State) -> Iterator[State]:
        c = s.coordinator
        if c.step or c.map != s.maps[-1] or "strays" in self.without:
            return
        for shard in range(len(s.shards)):
            knows = s.shards[shard].epoch == len(s.maps) - 1 if "told" in self.without else shard in c.told
            if not knows:
                yield _with(s, shard, self._placed(s, shard))._replace(coordinator=c._replace(told=c.told | {shard}))

    def _crash(self, s: State) -> Iterator[State]:
        """Every process may be killed, and is started again at once: with its settings, or those in force."""
        for shard in range(len(s.shards)):
            for number in {0, s.maps[-1]}:
                again = _restored(s, self._place(number, shard), 0)
                told = s.coordinator.told - {shard}  # its epoch tells
                yield _with(s, shard, again)._replace(coordinator=s.coordinator._replace(told=told))
        for number in {0, s.maps[-1]}:
            yield s._replace(worker=Worker(number))
            maps = s.maps if number == s.maps[-1] else (*s.maps, number)
            moves = s.moves[1:] if s.coordinator.step else s.moves  # nobody asks again
            yield s._replace(coordinator=Coordinator(number), maps=maps, moves=moves)

    def wrong(self, s: State) -> str:
        """What does not hold in a state; "": all does."""
        for i, shard in enumerate(s.shards):
            if shard.rows != rows_at(shard.clock, shard.place):
                return f"shard {i} has {shard.rows} at {shard.clock} as {shard.place}"
        return ""

    def is_done(self, s: State) -> bool:
        """Whether everything is learned, by the shards of the map in force, and nothing is left to do."""
        number = s.maps[-1]
        return (
            not s.moves
            and not s.coordinator.step
            and s.coordinator.map == number
            and all(
                (s.shards[i].clock, s.shards[i].place) == (self.batches, self._place(number, i))
                for i in self.maps[number]
            )
        )


def _restored(s: State, place: Place | None, epoch: int) -> Shard:
    if place is None:
        return Shard(None, epoch)
    clock, rows = s.saved
    return Shard(place, epoch, clock, tuple(n if place.has(key) else 0 for key, n in enumerate(rows)))


def _with(s: State, index: int, shard: Shard) -> State:
    return s._replace(shards=(*s.shards[:index], shard, *s.shards[index + 1 :]))


class Explored(NamedTuple):
    """What was found.

    Attributes:
        states: how many there are.
        wrong: what does not hold in one of them; "": nothing.
        stuck: a state from which the end cannot be reached any more; None: there is none.
    """

    states: int
    wrong: str
    stuck: State | None


def explore(model: Model) -> Explored:
    """All states."""
    first = model.first()
    before: dict[State, list[State]] = {first: []}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        if found := model.wrong(state):
            return Explored(len(before), found, None)
        for after in model.steps(state):
            if after == state:
                continue
            if after not in before:
                before[after] = []
                waiting.append(after)
            before[after].append(state)
    good = {state for state in before if model.is_done(state)}
    waiting = deque(good)
    while waiting:
        for state in before[waiting.popleft()]:
            if state not in good:
                good.add(state)
                waiting.append(state)
    stuck = next((state for state in before if state not in good), None)
    return Explored(len(before), "", stuck)


def without(model: Model, *parts: str) -> Model:
    """The protocol without parts of it."""
    return replace(model, without=frozenset(parts))
