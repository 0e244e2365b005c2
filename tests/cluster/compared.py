"""Blocks of models that learn from one log, as workers would have written them."""

import numpy as np

from streamtrain.model.features import Categorical, Label
from streamtrain.model.model import Model
from streamtrain.model.schema import Schema
from streamtrain.quality.blocks import Block, BlockColumns, BlockFigures, Slices, figures_of
from streamtrain.quality.comparison import StoredBlocks
from streamtrain.store.redis.blocks import BlockLog, RedisBlocks
from streamtrain.store.redis.server import RedisServer

LOG = BlockLog("clicks", "x1", 100, 50)


def model() -> Model:
    schema = Schema(features=[Categorical("country", 2), Categorical("device", 2)], label=Label("click"), time="ts")
    return Model(schema, lambda inputs: inputs["country"])


def blocks(name: str, numbers: range, shift: float = 0.0, log: BlockLog = LOG) -> StoredBlocks:
    """Blocks of one log, of a model that is so far off in its log-odds."""
    of, slices = model(), Slices(model(), ["country=DE"])
    found: dict[tuple[int, int], BlockFigures] = {}
    for number in numbers:
        random = np.random.default_rng(number)
        logits = random.normal(size=(log.size, 1))
        labels = (random.random((log.size, 1)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        predictions = (1 / (1 + np.exp(-(logits + shift)))).astype(np.float32)
        bits = (np.arange(log.size) % 2).astype(np.uint32)
        columns = BlockColumns(predictions, labels, np.ones(log.size, np.float32), bits)
        found[0, number] = figures_of(Block(0, number, 1000.0 + number, [columns]), of, slices)
    return StoredBlocks(name, log, found)


def store(server: RedisServer, stored: StoredBlocks) -> None:
    """Writes blocks, as a worker does."""
    contents = [(partition, number, one.encode()) for (partition, number), one in stored.blocks.items()]
    RedisBlocks(server, stored.model).put(stored.log, contents)
