"""Impressions: each is joined or a dead letter, however deep the stack; what is joined is the message, with a label.

Input: messages, with a byte 0xFE between them.
"""

import json
from collections.abc import Iterator

from streamtrain.join.engine import JoinLabel, PartitionJoin, Rules
from tests.fuzz.readers import in_join
from tests.fuzz.seeds import SAMPLES

_RULES = Rules((JoinLabel("fuzzed", frozenset({"click"}), 60.0),), grace=60.0)


def run(data: bytes) -> None:
    """One input."""
    messages = data.split(in_join.BETWEEN)[: in_join.MOST]
    impressions = in_join.read(in_join.READER.impressions, messages)
    join = PartitionJoin(_RULES)
    join.read_impressions(impressions, len(messages))
    join.advance(4e11, 4e11)
    output = join.output
    assert len(output.samples) + len(output.late_impressions) == len(impressions)
    for sample in output.samples:
        message = messages[sample.offset]
        assert sample.impression == message.rstrip()
        try:
            meant = json.loads(message)
        except ValueError:  # text that is not UTF-8 in a field that is not read, or a number of 4,301 digits
            continue
        assert json.dumps(json.loads(sample.value)) == json.dumps(meant | {"fuzzed": 0})


def seeds() -> Iterator[bytes]:
    """Good ones and bad ones."""
    yield from in_join.SEEDS
    yield in_join.BETWEEN.join(SAMPLES)
    yield in_join.BETWEEN.join(in_join.SEEDS)
