"""Nothing stands still: whatever is assigned, taken away, full or out of range, all messages are taken in the end.

State machines drive the buffer of a worker and a joiner over a model of librdkafka. `FAULTS` are put in on purpose: the
machines must find each.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from streamtrain.errors import OffsetGone
from streamtrain.join import joiner
from streamtrain.join.joiner import Joiner
from streamtrain.join.partition import JoinedPartition
from streamtrain.settings.groups import Settings
from streamtrain.stream.buffer import PartitionBuffer
from streamtrain.stream.kafka.pauses import Pauses
from streamtrain.stream.kafka.source import KafkaSource
from streamtrain.stream.source import Listener
from streamtrain.stream.standstill import StandstillWatch
from tests.stream.kafka.model import ModelKafka

PARTITIONS = 3
TOPIC = "samples"
BYTES = 100
NUMBERS = st.sets(st.integers(0, PARTITIONS - 1), min_size=1)


class Worker:
    """Learns what is buffered: a clock by partition, as shards have it."""

    def __init__(self, buffer: PartitionBuffer) -> None:
        self.buffer = buffer
        self.clock = dict.fromkeys(range(PARTITIONS), 0)
        self.mine: set[int] = set()
        self.got: dict[int, list[bytes]] = {one: [] for one in range(PARTITIONS)}

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        self.mine.update(partitions)
        for one in sorted(self.mine):
            self.buffer.seek(one, self.clock[one])
        return {one: self.clock[one] for one in partitions}

    def revoked(self, partitions: Sequence[int]) -> None:
        self.mine.difference_update(partitions)

    def lost(self, partitions: Sequence[int]) -> None:
        self.mine.difference_update(partitions)

    def learn(self, partition: int, most: int) -> None:
        start = self.clock[partition]
        end = self.buffer.reach(partition, start, most)
        if partition in self.mine and end > start:
            self.got[partition] += self.buffer.read([(partition, start, end)]).values
            self.clock[partition] = end
            self.buffer.release(partition, end)


class BufferMachine(RuleBasedStateMachine):
    """A worker's buffer over Kafka's source."""

    def __init__(self) -> None:
        super().__init__()
        self.kafka = ModelKafka()
        for one in range(PARTITIONS):
            assert self.kafka.logs[TOPIC, one] == []
        self.buffer = self.make_buffer()
        self.worker = Worker(self.buffer)
        self.buffer.open(cast(Any, self), "group", "job", self.worker)

    def make_buffer(self) -> PartitionBuffer:
        return PartitionBuffer(BYTES, skip_gone=True)

    def source(self, group: str, job: str, listener: Listener, incarnation: object) -> KafkaSource:
        return KafkaSource(cast(Any, self.kafka), TOPIC, group, listener, client="client", check=lambda: None)

    @initialize(partitions=NUMBERS)
    def begin(self, partitions: set[int]) -> None:
        for one in partitions:
            self.write(one, 8, 40)
        self.assign(partitions)

    @property
    def client(self) -> Any:
        return self.kafka.consumers[-1]

    @rule(partition=st.integers(0, PARTITIONS - 1), count=st.integers(1, 2), size=st.sampled_from([20, 40]))
    def write(self, partition: int, count: int, size: int) -> None:
        log = self.kafka.logs[TOPIC, partition]
        log += [b"%d/%d" % (partition, len(log) + i) + b"." * size for i in range(count)]

    @rule(partitions=NUMBERS)
    def assign(self, partitions: set[int]) -> None:
        if more := partitions - self.worker.mine:
            self.client.rebalance("assign", [(TOPIC, one) for one in more])
            self.poll(0)

    @rule(partitions=NUMBERS, kind=st.sampled_from(["revoke", "lost"]))
    def take_away(self, partitions: set[int], kind: str) -> None:
        if fewer := partitions & self.worker.mine:
            self.client.rebalance(kind, [(TOPIC, one) for one in fewer])
            self.poll(0)

    @rule(most=st.sampled_from([1, 4, 20]))
    def poll(self, most: int) -> None:
        self.buffer.poll(most, 0.0)

    @rule(partition=st.integers(0, PARTITIONS - 1), most=st.integers(1, 4))
    def learn(self, partition: int, most: int) -> None:
        self.worker.learn(partition, most)

    @precondition(lambda self: self.worker.mine)
    @rule(back=st.integers(1, 5))
    def rewind(self, back: int) -> None:
        """A shard was restored."""
        for one in sorted(self.worker.mine):
            self.worker.clock[one] = max(self.worker.clock[one] - back, self.kafka.low[TOPIC, one])
            self.worker.got[one] = self.worker.got[one][: self.worker.clock[one]]
            self.buffer.seek(one, self.worker.clock[one])

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def delete(self, partition: int) -> None:
        """Retention: all that is learned, and one message more."""
        place = (TOPIC, partition)
        if not self.kafka.low[place] and partition not in self.worker.mine:
            upto = min(self.worker.clock[partition] + 1, len(self.kafka.logs[place]))
            self.kafka.low[place] = upto
            self.worker.got[partition] = self.kafka.logs[place][:upto]
            self.worker.clock[partition] = max(self.worker.clock[partition], upto - 1)

    def teardown(self) -> None:
        for _ in range(200):
            self.poll(1000)
            for one in sorted(self.worker.mine):
                self.worker.learn(one, 1000)
        for one in sorted(self.worker.mine):
            log = self.kafka.logs[TOPIC, one]
            assert self.worker.clock[one] == len(log), f"partition {one} stands at {self.worker.clock[one]}"
            low = self.kafka.low[TOPIC, one]
            assert self.worker.got[one][low:] == log[low:]


class CuredMachine(BufferMachine):
    """The same with a watch, whose minutes pass with the polls: what stands still by a fault is read anew."""

    cured = 0

    def __init__(self) -> None:
        self.at = 0.0
        super().__init__()

    def make_buffer(self) -> PartitionBuffer:
        def ends() -> dict[int, int]:
            return {one: len(self.kafka.logs[TOPIC, one]) for one in range(PARTITIONS)}

        self.watch = StandstillWatch(ends, str, now=lambda: self.at)
        return PartitionBuffer(BYTES, skip_gone=True, watch=self.watch)

    def poll(self, most: int) -> None:
        self.at += 10
        self.watch.look()
        before = self.client
        self.buffer.poll(most, 0.0)
        if self.client is not before:
            CuredMachine.cured += 1
            # The group gives a new member what the old one had.
            mine = [one for one in range(PARTITIONS) if before.had(TOPIC, one)]
            self.client.rebalance("assign", [(TOPIC, one) for one in mine])
            self.buffer.poll(most, 0.0)


class JoinMachine(RuleBasedStateMachine):
    """A joiner over Kafka's clients: both logs are read to their ends."""

    @initialize()
    def begin(self) -> None:
        self.kafka = ModelKafka()
        self.joiner = Joiner(
            Settings.model_validate(
                {
                    "stream": {"url": "kafka://127.0.0.1:1", "topic": TOPIC, "dead_letters": False},
                    "join": {
                        "impressions": "impressions",
                        "outcomes": "outcomes",
                        "wait": 200.0,
                        "grace": 10.0,
                        "commit_every": 1e-9,
                        "labels": {"click": {"kinds": ["click"]}},
                    },
                }
            )
        )
        self.logs = ("impressions", "outcomes")
        for place in [(topic, one) for topic in self.logs for one in range(PARTITIONS)]:
            assert self.kafka.logs[place] == []
        self.joiner.topics.samples._service = cast(Any, self.kafka)
        for log in (self.joiner.topics.impressions, self.joiner.topics.outcomes):
            log.identity, log.committed = lambda: "the same", lambda group: {}  # type: ignore[method-assign]
        self.joiner._check_identities()
        self.joiner._partition_count = PARTITIONS
        self.joiner._limits = dict.fromkeys(self.joiner._written, 1_000_000)
        self.joiner._open()
        self.clock: dict[tuple[str, int], float] = {}

    @rule(
        topic=st.sampled_from(["impressions", "outcomes"]),
        partition=st.integers(0, PARTITIONS - 1),
        gaps=st.lists(st.integers(0, 90), min_size=1, max_size=5),
    )
    def write(self, topic: str, partition: int, gaps: list[int]) -> None:
        for gap in gaps:
            at = self.clock[topic, partition] = self.clock.get((topic, partition), 1e9) + gap
            log = self.kafka.logs[topic, partition]
            message = {"id": f"{partition}/{len(log)}", "time": at} | ({"kind": "click"} if topic == "outcomes" else {})
            log.append(json.dumps(message).encode())

    @rule(partitions=NUMBERS, kind=st.sampled_from(["revoke", "lost"]))
    def rebalance(self, partitions: set[int], kind: str) -> None:
        """Every rebalance takes all away, and some come back."""
        client = self.kafka.consumers[-1]
        client.rebalance(kind, [(topic, one) for topic in self.logs for one in range(PARTITIONS)])
        client.rebalance("assign", [(topic, one) for topic in self.logs for one in partitions])
        self.step()

    @rule()
    def step(self) -> None:
        self.joiner.step()

    def teardown(self) -> None:
        if not hasattr(self, "joiner"):
            return
        self.rebalance(set(range(PARTITIONS)), "revoke")
        for _ in range(20 + sum(map(len, self.kafka.logs.values()))):
            self.joiner.step()
        for number, partition in self.joiner.partitions.items():
            ends = tuple(len(self.kafka.logs[topic, number]) for topic in self.logs)
            assert partition.join.positions == ends, f"partition {number} stands at {partition.join.positions}"
        assert sorted(self.joiner.partitions) == list(range(PARTITIONS))


QUICK = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)
THOROUGH = settings(QUICK, max_examples=10_000, database=None, print_blob=False, phases=[Phase.generate])


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one log of a join is read ahead of the other."""
    monkeypatch.setattr(joiner, "_MOST_MESSAGES", 3)


@pytest.mark.parametrize("machine", [BufferMachine, JoinMachine])
def test_all_that_is_written_is_taken(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


def _assignment_unpauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer of a worker took itself for not paused once it was assigned a partition, and resumed nothing."""
    assigned = KafkaSource._assign

    def assign(self: KafkaSource, partitions: Sequence[int]) -> None:
        assigned(self, partitions)
        self._is_paused = False

    monkeypatch.setattr(KafkaSource, "_assign", assign)


def _pauses_are_forgotten_here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The joiner forgot what it had paused of partitions that went, and librdkafka did not."""

    def forget(self: Pauses, partitions: Any) -> None:
        self._paused = self._paused.difference(partitions)

    monkeypatch.setattr(Pauses, "forget", forget)


def _never_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that was full is never fetched into again once it is empty."""
    monkeypatch.setattr(KafkaSource, "resume", lambda self: None)


def _gone_is_not_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition whose messages were deleted stays where it was."""

    def skip(self: PartitionBuffer, gone: OffsetGone) -> None:
        self.skipped += 1

    monkeypatch.setattr(PartitionBuffer, "_skip_deleted", skip)


def _seek_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewind changes the position, and not what is fetched."""
    monkeypatch.setattr(KafkaSource, "_fetch_from", lambda self, at: None)


def _end_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that waits for the other one goes on waiting when that is at its end."""
    monkeypatch.setattr(JoinedPartition, "is_at_end", lambda self, log: False)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], type[RuleBasedStateMachine]] = {
    _assignment_unpauses: BufferMachine,
    _pauses_are_forgotten_here_only: JoinMachine,
    _never_resumed: BufferMachine,
    _gone_is_not_sought: BufferMachine,
    _seek_is_not_fetched: BufferMachine,
    _end_is_not_noticed: JoinMachine,
}


def assign_while_paused(machine: BufferMachine) -> None:
    """A partition is assigned while messages of another wait that is paused, and half of the buffer is free."""
    machine.begin({0})
    machine.poll(20)
    machine.write(0, 2, 40)
    machine.poll(1)
    assert machine.buffer.source.is_paused
    machine.learn(0, 6)
    assert BYTES // 2 < machine.buffer.nbytes <= BYTES
    machine.assign({1})
    machine.teardown()


def test_what_stands_still_by_a_fault_is_cured(monkeypatch: pytest.MonkeyPatch) -> None:
    cured = CuredMachine.cured
    for machine in (BufferMachine, CuredMachine):
        assign_while_paused(machine())
    assert CuredMachine.cured == cured
    _assignment_unpauses(monkeypatch)
    with pytest.raises(AssertionError, match="stands at"):
        assign_while_paused(BufferMachine())
    assign_while_paused(CuredMachine())
    assert CuredMachine.cured == cured + 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, FlakyFailure)):
        run_state_machine_as_test(FAULTS[fault], settings=THOROUGH)
