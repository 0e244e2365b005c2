"""The feed: what it holds, gives, forgets and passes over. What the services do is in test_contract.py."""

import inspect
from collections.abc import Mapping, Sequence

import pytest

from streamtrain.errors import OffsetGone
from streamtrain.ps.clock import Span
from streamtrain.settings.groups import StreamSettings
from streamtrain.stream.buffer import PartitionBuffer
from streamtrain.stream.source import Fetched


class Told:
    """A source that says what it is told to, and a stream of it; notes what is asked of it."""

    def __init__(self) -> None:
        self.answers: list[list[Fetched] | OffsetGone] = []
        self.behind: dict[int, int] = {}
        self.at: dict[int, int] = {}
        self.asked: list[tuple[object, ...]] = []
        self.is_paused = False

    def source(self, *_: object) -> "Told":
        return self

    def poll(self, max_messages: int, seconds: float, min_messages: int = 1) -> list[Fetched]:
        self.asked.append(("poll", max_messages, seconds))
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, OffsetGone):
            raise answer
        return answer

    def lag(self) -> dict[int, int]:
        return self.behind

    def positions(self) -> dict[int, int]:
        return self.at

    def seek(self, partition: int, offset: int) -> None:
        self.asked.append(("seek", partition, offset))

    def pause(self) -> None:
        self.is_paused = True
        self.asked.append(("pause",))

    def resume(self) -> None:
        self.is_paused = False
        self.asked.append(("resume",))

    def close(self) -> None:
        self.asked.append(("close",))


class Listening:
    """A listener whose partitions begin at the offsets given."""

    def __init__(self, positions: Mapping[int, int]) -> None:
        self.positions = positions
        self.told: list[tuple[str, list[int]]] = []

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        return {one: self.positions[one] for one in partitions}

    def revoked(self, partitions: Sequence[int]) -> None:
        self.told.append(("revoked", [*partitions]))

    def lost(self, partitions: Sequence[int]) -> None:
        self.told.append(("lost", [*partitions]))


def opened(
    positions: Mapping[int, int], max_bytes: int = 1000, *, skip_gone: bool = False
) -> tuple[PartitionBuffer, Told]:
    feed, told = PartitionBuffer(max_bytes=max_bytes, skip_gone=skip_gone), Told()
    feed.open(told, "group", "job", Listening(positions))  # type: ignore[arg-type]  # a source is enough of a stream
    feed.assigned(sorted(positions))
    return feed, told


def fetched(partition: int, offsets: Sequence[int], size: int = 1) -> Fetched:
    return Fetched(partition, [*offsets], [b"%d" % (at % 10) * size for at in offsets], [1000 * at for at in offsets])


def fetch(feed: PartitionBuffer, told: Told, *given: Fetched) -> None:
    told.answers.append([*given])
    feed.poll(7, 0.5)
    assert told.asked[-1] == ("poll", 7, 0.5)


def test_what_is_fetched_is_read_by_ranges_until_it_is_released() -> None:
    feed, told = opened({0: 3, 1: 0})
    fetch(feed, told, fetched(0, [3, 4, 7]), fetched(1, [0, 1]))
    fetch(feed, told, fetched(0, [9]))
    read = feed.read([Span(0, 4, 9), Span(1, 0, 1), Span(0, 9, 10)])
    assert read.values == [b"4", b"7", b"0", b"9"]
    assert read.offsets.tolist() == [4, 7, 0, 9]
    assert read.times.tolist() == [4000, 7000, 0, 9000]
    assert read.starts == [0, 2, 3, 4]
    assert feed.nbytes == 6
    feed.release(0, 7)
    assert feed.nbytes == 4
    assert feed.read([Span(0, 3, 10)]).offsets.tolist() == [7, 9]
    assert feed.read([Span(0, 3, 10)]).times.tolist() == [7000, 9000]
    feed.release(0, 4)  # long done
    feed.release(5, 1)  # of somebody else
    assert feed.nbytes == 4


def test_how_far_a_range_reaches() -> None:
    """To the next message: so what lies between goes with those before."""
    feed, told = opened({0: 3})
    assert feed.reach(0, 3, 5) == 3
    fetch(feed, told, fetched(0, [3, 4, 7, 9]))
    assert [feed.reach(0, 3, most) for most in range(6)] == [3, 4, 7, 9, 10, 10]
    assert feed.reach(0, 4, 1) == 7
    assert feed.reach(0, 5, 1) == 9
    assert feed.reach(0, 20, 1) == 20
    assert feed.reach(8, 6, 1) == 6


def test_offsets_without_a_message_are_passed_over() -> None:
    feed, told = opened({0: 3, 1: 0})
    told.at = {0: 7, 1: 2}
    fetch(feed, told, fetched(0, [3, 4]), fetched(1, [0, 1, 2]))
    assert feed.reach(0, 3, 1) == 4
    assert feed.reach(0, 3, 2) == 7
    assert feed.reach(1, 0, 9) == 3  # which is further than the source says
    feed.seek(0, 7)
    assert not [one for one in told.asked if one[0] == "seek"]


@pytest.mark.parametrize(("start", "end", "count"), [(3, 10, 4), (3, 4, 1), (4, 9, 2), (5, 7, 0), (8, 1 << 62, 1)])
def test_a_range_has_as_many_samples_as_messages(start: int, end: int, count: int) -> None:
    feed, told = opened({0: 3})
    fetch(feed, told, fetched(0, [3, 4, 7, 9]))
    assert feed.count(0, start, end) == count
    assert feed.count(1, start, end) == 0


def test_more_than_it_may_hold_is_not_fetched_until_half_is_released() -> None:
    feed, told = opened({0: 0, 1: 0}, max_bytes=100)
    fetch(feed, told, fetched(0, range(10), size=10))
    feed.poll(1, 0)
    assert ("pause",) not in told.asked  # it is just full
    fetch(feed, told, fetched(0, [10]))
    feed.poll(1, 0)
    assert told.asked[-2:] == [("pause",), ("poll", 1, 0)]
    feed.release(0, 5)
    feed.poll(1, 0)
    assert told.asked.count(("resume",)) == 0
    feed.release(0, 6)
    feed.poll(1, 0)
    assert told.asked[-2:] == [("resume",), ("poll", 1, 0)]
    feed.poll(1, 0)
    assert told.asked.count(("resume",)) == told.asked.count(("pause",)) == 1


def test_what_is_assigned_meanwhile_neither_ends_a_pause_nor_is_paused_anew() -> None:
    """The source knows what is paused; it keeps it through assignments."""
    feed, told = opened({0: 0, 1: 0}, max_bytes=100)
    fetch(feed, told, fetched(0, range(11), size=10))
    feed.poll(1, 0)
    feed.release(0, 3)
    feed._listener.positions = {2: 0}  # type: ignore[union-attr]
    feed.assigned([2])
    feed.poll(1, 0)
    assert [one for one in told.asked if one[0] != "poll"] == [("pause",)]
    feed.release(0, 6)
    feed.poll(1, 0)
    assert [one for one in told.asked if one[0] != "poll"] == [("pause",), ("resume",)]


def test_nothing_is_paused_or_resumed_before_partitions_are_assigned() -> None:
    feed, told = PartitionBuffer(), Told()
    feed.open(told, "group", "job", Listening({}))  # type: ignore[arg-type]  # a source is enough of a stream
    feed.poll(7, 0.5)
    assert told.asked == [("poll", 7, 0.5)]


def test_going_back_a_little_fetches_nothing_again() -> None:
    feed, told = opened({0: 3})
    fetch(feed, told, fetched(0, [3, 4, 7]))
    feed.release(0, 4)
    for offset in (4, 6, 8):
        feed.seek(0, offset)
    feed.seek(1, 0)  # of somebody else
    assert not [one for one in told.asked if one[0] == "seek"]
    assert feed.nbytes == 2


@pytest.mark.parametrize("offset", [3, 9])
def test_going_elsewhere_fetches_anew(offset: int) -> None:
    feed, told = opened({0: 3})
    fetch(feed, told, fetched(0, [3, 4, 7]))
    feed.release(0, 4)
    feed.release(0, 3)  # which is not held again by that
    feed.seek(0, offset)
    assert told.asked[-1] == ("seek", 0, offset)
    assert feed.nbytes == feed.count(0, 0, 100) == 0
    assert feed.reach(0, offset, 5) == offset
    feed.seek(0, offset)
    assert told.asked.count(("seek", 0, offset)) == 1


def test_release_beyond_what_is_held() -> None:
    feed, told = opened({0: 3})
    fetch(feed, told, fetched(0, [3]))
    feed.release(0, 6)
    assert feed.reach(0, 3, 1) == 6
    feed.seek(0, 6)
    feed.seek(0, 5)
    assert told.asked[-1] == ("seek", 0, 5)


@pytest.mark.parametrize("how", ["revoked", "lost"])
def test_what_goes_to_others_is_forgotten(how: str) -> None:
    feed, told = opened({0: 0, 1: 0})
    fetch(feed, told, fetched(0, [0, 1]), fetched(1, [0]))
    getattr(feed, how)([0])
    assert feed._listener.told == [(how, [0])]  # type: ignore[union-attr]
    assert feed.nbytes == 1
    assert feed.count(0, 0, 9) == 0
    assert feed.count(1, 0, 9) == 1


def test_idle_is_of_which_all_that_there_is_was_fetched_and_released() -> None:
    feed, told = opened({0: 0, 1: 0, 2: 0})
    told.behind = {0: 0, 1: 1, 2: 0}
    fetch(feed, told, fetched(2, [0]))
    assert feed.idle() == {0}
    feed.release(2, 1)
    assert feed.idle() == {0, 2}


def test_messages_that_were_deleted_end_it_or_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    gone = OffsetGone(0, 3, 8, 20)
    feed, told = opened({0: 3})
    told.answers.append(gone)
    with pytest.raises(OffsetGone, match="partition 0 has offsets 8 to 19, but 3 is the next to be read"):
        feed.poll(1, 0)
    feed, told = opened({0: 3}, skip_gone=True)
    told.answers.append(gone)
    feed.poll(1, 0)
    assert feed.skipped == 5
    said = "partition 0: 5 samples were deleted before they were learned; resuming at offset 8"
    assert [(one.getMessage(), one.batch) for one in caplog.records] == [(said, "0:3-7")]  # type: ignore[attr-defined]
    assert told.asked[-1] == ("seek", 0, 8)
    assert feed.reach(0, 3, 1) == 8
    told.answers.append(OffsetGone(0, 8, 9, 20))
    feed.poll(1, 0)
    assert feed.skipped == 6


@pytest.mark.parametrize("skip_gone", [False, True])
def test_a_partition_that_has_less_than_was_learned_ends_it(skip_gone: bool) -> None:
    feed, told = opened({0: 30}, skip_gone=skip_gone)
    told.answers.append(OffsetGone(0, 30, 0, 29))
    with pytest.raises(OffsetGone, match="has offsets 0 to 28, but 30 is the next"):
        feed.poll(1, 0)
    assert not feed.skipped


@pytest.mark.parametrize("wanted", [0, 15, 20])
def test_a_partition_that_was_cut_and_has_grown_again_is_not_skipped_backwards(
    wanted: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What was asked for was not there; by the time that it is asked what is, there is more."""
    feed, told = opened({0: wanted})
    told.answers.append(OffsetGone(0, wanted, 0, 20))
    with pytest.raises(OffsetGone, match=f"did not have offset {wanted}, .* was cut off, and has grown again"):
        feed.poll(1, 0)
    feed, told = opened({0: wanted}, skip_gone=True)
    told.answers.append(OffsetGone(0, wanted, 0, 20))
    feed.poll(1, 0)
    assert feed.skipped == 0
    assert told.asked[-1] == ("seek", 0, wanted)
    assert feed.reach(0, wanted, 1) == wanted
    assert "was cut off, and has grown again" in caplog.text


def test_it_holds_and_skips_what_settings_say() -> None:
    defaults = {name: one.default for name, one in inspect.signature(PartitionBuffer).parameters.items()}
    settings = StreamSettings()
    assert defaults == {"max_bytes": settings.buffer_bytes, "skip_gone": settings.gone == "skip", "watch": None}


def test_it_closes_its_source() -> None:
    feed, told = opened({0: 0})
    feed.close()
    assert told.asked == [("close",)]
    PartitionBuffer().close()
