"""Rows of a model in Redis, looked up some at a time."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.origin import Found, Publication
from streamtrain.store.redis_layout import Layout
from streamtrain.store.redis_model import RedisModel

_MOST_DIGITS = 20  # of a number of a publication


class RedisLookup:
    """See Lookup.

    What the model is is asked for after the rows. A version's rows never change, and go after its name. Those that are
    read while the head is one publication have all that the one before has changed, which the commit makes sure of, and
    nothing of the next, which shards write after its commit only.

    Args:
        model: whose.
        publication: a version, or the head.
        layout: of its dictionary.
    """

    def __init__(self, model: RedisModel, publication: Publication, layout: Layout) -> None:
        self._model, self._publication, self._layout = model, publication, layout

    def look_up(self, keys: Mapping[str, NDArray[np.uint64]]) -> Found:
        """See Lookup. The round trip of the rows is followed by a short one."""
        encoded = self._model.buckets(self._layout).look_up(keys)
        number = self._number()
        codecs = {table: self._layout.codec(table) for table in keys}
        return Found(number, {table: (codecs[table].decode(rows), there) for table, (rows, there) in encoded.items()})

    def _number(self) -> int:
        server, names, publication = self._model.server, self._model.keys, self._publication
        if publication.version is not None:
            if not server.call("HEXISTS", names.versions, publication.version):
                raise PublicationCorrupt(f"version {publication.version} of {self._model.name} is deleted")
            return publication.number
        number, dictionary = server.call("HMGET", names.head, "number", "dictionary")
        if number is None or dictionary != b"%d" % self._layout.dictionary:
            raise PublicationCorrupt(f"the head of {self._model.name} was replaced: load it again")
        if not number.isdigit() or len(number) > _MOST_DIGITS:
            raise PublicationCorrupt(f"the head of {self._model.name} is damaged: its number is {number!r}")
        return int(number)
