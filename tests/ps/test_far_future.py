"""A sample of a time beyond what shards count seconds up to: it is learned as any other."""

import numpy as np

from streamtrain.ps.clock import Span
from tests.ps.counting import DENSE, plan_of
from tests.ps.served import served

YEAR_9000 = 221_845_392_000  # seconds since the epoch


def test_it_is_learned_and_what_comes_after_it() -> None:
    log = {0: [[1], [2]]}
    with served() as of:
        shards = of.shards()
        client = shards.client("worker", shards.agree())
        client.join()
        for start in (0, 1):
            spans = [Span(0, start, start + 1)]
            plan = plan_of(log, spans, 2)
            client.pull(plan).wait()
            gradients = -plan.counts(0).astype(np.float32)
            dense, statistics = np.full(DENSE, -1, np.float32), np.ones(2, np.float32)
            client.push(plan, gradients, dense, statistics, spans=spans, watermark=YEAR_9000).wait()
        client.skip([Span(0, 2, 3)], YEAR_9000).wait()
        client.close()
        assert [shard.clock() for shard in of.held] == [{0: 3}, {0: 3}]
        assert sum(len(shard.tables[0]) for shard in of.held) == 2
        assert [shard.watermark for shard in of.held] == [2**32 - 1] * 2
