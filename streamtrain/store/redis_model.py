"""A model's place in Redis: its keys, its head, and the dictionaries that are being built."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from streamtrain.errors import PublicationCorrupt, PublicationError
from streamtrain.store.origin import Publication
from streamtrain.store.plain import converted, parsed
from streamtrain.store.redis_buckets import Buckets
from streamtrain.store.redis_layout import Keys, Layout
from streamtrain.store.redis_log import Log, Token, entry_in
from streamtrain.store.redis_scripts import BEGIN, GARBAGE, RENEW, STATE, script_keys
from streamtrain.store.redis_server import RedisServer

logger = logging.getLogger(__name__)

_LEASE = 600.0  # seconds that a dictionary which is being built is kept after the last sign of its builder


@dataclass(frozen=True)
class Head:
    """The publication that is the head.

    Attributes:
        publication: what is said of it.
        layout: of its dictionary, which has all its rows, but for those that the log has after the commit before it.
        id: of the entry of its commit in the log.
        before: of the commit before it, or "0-0".
        tokens: of its shards.
    """

    publication: Publication
    layout: Layout
    id: str
    before: str
    tokens: list[Token]


class RedisModel:
    """A model in Redis. Thread-safe.

    Args:
        server: that has it.
        model: its name.

    Attributes:
        server: as given.
        keys: of the model.
        log: of its publications.
        name: for messages.

    Raises:
        ConfigError: there can be no such model.
    """

    def __init__(self, server: RedisServer, model: str) -> None:
        self.server, self.keys = server, Keys(model)
        self.log = Log(server, self.keys)
        self.name = f"model {model} at {server.name}"
        self._version = 0  # the last that was made here

    def run(self, script: str, *arguments: Any, keys: tuple[str, ...] = ()) -> Any:
        """The answer of a script."""
        every = [*script_keys(self.keys), *keys]
        return self.server.call("EVAL", script, len(every), *every, *arguments)

    def head(self) -> Head | None:
        """The head, if there is one.

        Raises:
            PublicationCorrupt: what is there is none.
        """
        flat = self.run(STATE)
        if not flat:
            return None
        found = dict(zip(flat[::2], flat[1::2], strict=True))
        try:
            return Head(
                Publication.of_json(parsed(found[b"publication"])),
                Layout.of_json(found[b"layout"]),
                entry_in(found[b"id"]),
                entry_in(found[b"before"]),
                converted(list[Token], parsed(found[b"tokens"])),
            )
        except (KeyError, ValueError) as exc:
            raise PublicationCorrupt(f"the head of {self.name} is damaged: {exc}") from exc

    def buckets(self, layout: Layout) -> Buckets:
        """Of a dictionary."""
        return Buckets(self.server, self.keys, layout)

    def begin(self, layout: Layout) -> Layout:
        """A new dictionary of such a layout; it is kept for ten minutes, and as long as its lease is renewed."""
        number = int(self.run(BEGIN, layout.as_json(), round(_LEASE * 1000)))
        return layout.numbered(number)

    @contextmanager
    def building(self, layout: Layout) -> Iterator[Layout]:
        """Begins a dictionary, which is deleted at the end of the block if no head or version has it by then."""
        target = self.begin(layout)
        try:
            yield target
        finally:
            with suppress(PublicationError):  # what is left is deleted when its lease has run out
                self.server.call("ZREM", self.keys.building, target.dictionary)
                self.sweep()

    def next_version(self) -> int:
        """A number for a new version, higher than all that this object has given.

        Also if the server has forgotten them: who still serves a version of before would else take another for it.
        """
        version = int(self.server.call("HINCRBY", self.keys.numbers, "version", 1))
        if version <= self._version:
            version = int(self.server.call("HINCRBY", self.keys.numbers, "version", self._version + 1 - version))
        self._version = max(self._version, version)  # another thread may have been given a later one
        return version

    def renewing(self, layout: Layout) -> Callable[[], None]:
        """A function to be called often while a dictionary is being built: it renews the lease when that is due.

        It raises PublicationError if the dictionary is not there any more.
        """
        due = 0.0

        def renew() -> None:
            nonlocal due
            if time.monotonic() < due:
                return
            if not self.run(RENEW, layout.dictionary, round(_LEASE * 1000)):
                raise PublicationError(f"dictionary {layout.dictionary} of {self.name} is gone: begin anew")
            due = time.monotonic() + _LEASE / 60

        return renew

    def sweep(self) -> int:
        """Deletes dictionaries that nobody will use any more, and returns how many there were."""
        flat = self.run(GARBAGE)
        for number, layout in zip(flat[::2], flat[1::2], strict=True):
            try:
                self.buckets(Layout.of_json(layout).numbered(int(number))).delete()
            except ValueError as exc:
                logger.warning("rows of dictionary %s of %s cannot be found to delete: %s", int(number), self.name, exc)
            self.server.call("DEL", self.keys.weights(int(number)), self.keys.sums(int(number)))
            self.server.call("HDEL", self.keys.dictionaries, number)
        return len(flat) // 2
