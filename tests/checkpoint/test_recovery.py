"""Promise: with real epochs, whatever crashes, and however many shards come back, each sample counts exactly once."""

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.ps.clock import Cursor, Ends, PushOutcome
from streamtrain.ps.push import Push
from tests.checkpoint.saved import Cluster
from tests.ps.counting import assert_exact, pushes
from tests.store.checkpoint.checkpoints import content_of, set_content

PARTITIONS = 2
PLACES = count()


class Recovery(RuleBasedStateMachine):
    """One worker reads two partitions; its pushes reach some shards before others, or never."""

    @initialize(shards=st.integers(1, 3))
    def begin(self, shards: int) -> None:
        self.place = f"memory://recovery/{next(PLACES)}"
        self.log: dict[int, list[list[int]]] = {p: [] for p in range(PARTITIONS)}
        self.unanswered: dict[int, Push] = {}  # by shard
        self.on_the_way: list[tuple[int, Push]] = []  # that may come at any time
        self.start(shards)

    def start(self, shards: int) -> None:
        """All shards start anew, so many of them."""
        self.cluster = Cluster(self.place, shards, cut_patience=0.0, keep=3, full_every=2)
        self.on_the_way = []
        self.rewind()

    def rewind(self) -> None:
        self.cursor = Cursor()
        self.cursor.rewind(range(PARTITIONS), [shard.clock() for shard in self.cluster.shards])
        self.unanswered = {}

    @rule(partition=st.integers(0, PARTITIONS - 1), ids=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6))
    def produce(self, partition: int, ids: list[list[int]]) -> None:
        self.log[partition] += ids

    @precondition(lambda self: not self.unanswered)
    @rule(most=st.integers(1, 5), reached=st.integers(0, 3))
    def push(self, most: int, reached: int) -> None:
        """To the first few shards; the others wait for the rest."""
        spans = self.cursor.next(Ends({p: len(s) for p, s in self.log.items()}), most)
        if spans:
            self.unanswered = dict(enumerate(pushes(self.log, spans, len(self.cluster.nodes))))
            self.deliver(reached)

    @precondition(lambda self: self.unanswered)
    @rule(reached=st.integers(1, 3))
    def deliver(self, reached: int) -> None:
        for s in list(self.unanswered)[:reached]:
            if self.cluster.shards[s].push(self.unanswered.pop(s)).outcome is PushOutcome.REJECTED:
                self.rewind()
                return

    @rule()
    def worker_crashes(self) -> None:
        self.on_the_way += self.unanswered.items()
        self.rewind()

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data())
    def late_arrival(self, data: st.DataObject) -> None:
        s, push = data.draw(st.sampled_from(self.on_the_way), "push")
        self.cluster.shards[s].push(push)

    @rule(full=st.booleans())
    def checkpoint(self, full: bool) -> None:
        clocks = [shard.clock() for shard in self.cluster.shards]
        assert self.cluster.take(full=full).aligned == all(clock == clocks[0] for clock in clocks)

    @rule(data=st.data())
    def shard_crashes(self, data: st.DataObject) -> None:
        """The worker does not know of it, and goes on until it is rejected."""
        s = data.draw(st.integers(0, len(self.cluster.nodes) - 1), "shard")
        try:
            self.cluster.crash(s)
        except CheckpointError:
            assert not self.usable(len(self.cluster.nodes))

    @rule()
    def half_an_epoch(self) -> None:
        """All are cut, and nothing comes of it."""
        epoch = self.cluster.epochs.next()
        for node in self.cluster.nodes:
            node.cut(epoch, node.freeze().clock, False)

    @precondition(lambda self: len(self.cluster.epochs.numbers()) > 1)
    @rule(data=st.data())
    def newest_is_damaged(self, data: st.DataObject) -> None:
        newest = self.cluster.epochs.numbers()[-1]
        url = self.cluster.epochs.directory(newest).url
        name = data.draw(st.sampled_from(["manifest.json", "shards/0.safetensors"]), "file")
        set_content(url, name, content_of(url, name)[:-1])

    @rule(shards=st.integers(1, 4))
    def all_restart(self, shards: int) -> None:
        try:
            self.start(shards)
        except CheckpointError:
            assert not self.usable(shards)

    def usable(self, shards: int) -> list[int]:
        """Epochs that so many shards can be restored from."""
        found = []
        for number in self.cluster.epochs.numbers():
            try:
                chain = self.cluster.epochs.open(number)
                chain.verify()
            except CheckpointCorrupt:
                continue
            if chain.about["aligned"] or len(chain.shards) == shards:
                found.append(number)
        return found

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        self.rewind()
        ends = Ends({p: len(samples) for p, samples in self.log.items()})
        for _ in range(10_000):
            spans = self.cursor.next(ends, 4)
            if not spans:
                break
            for pushed in self.cluster.push(pushes(self.log, spans, len(self.cluster.nodes))):
                assert pushed.outcome is not PushOutcome.REJECTED, "nobody else is there"
        else:
            raise AssertionError("it does not come to rest")
        assert_exact(self.cluster.shards, self.log)
        self.cluster.take(full=True)
        assert_exact(Cluster(self.place, 3).shards, self.log)


TestRecovery = Recovery.TestCase
TestRecovery.settings = settings(max_examples=25, stateful_step_count=40)
