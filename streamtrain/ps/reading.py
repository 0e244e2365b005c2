"""Reading: what shards have now, for who is no worker. Nobody waits for it, whatever the consistency is."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from streamtrain.ps import wire
from streamtrain.ps.control import RemoteControl
from streamtrain.ps.session import Into, Now, Pending


class ReadSource:
    """A shard behind gRPC; see Pulls.

    Args:
        control: of the shard.
    """

    def __init__(self, control: RemoteControl) -> None:
        self._control = control

    def pull(self, keys: Sequence[NDArray[np.uint64]], into: Into, ahead: int) -> Pending[None]:
        """See Pulls. Waits for the answer; `ahead` is of workers."""
        floats = wire.Bulk(self._control.read(keys), "float32")
        for out in (*into.rows, into.dense, into.statistics):
            floats.floats_into(out)
        floats.end()
        return Now(None)
