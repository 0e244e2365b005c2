"""Places: where shards are, by the settings: at one address each, or at two if they have backups."""

from collections.abc import Callable, Sequence
from typing import Any

from streamtrain.errors import ConfigError
from streamtrain.ps.control import CHANNEL_OPTIONS
from streamtrain.ps.route import Pair, Place
from streamtrain.ps.security import Security, connect
from streamtrain.settings import PsSettings


def places_of(
    addresses: Sequence[str], settings: PsSettings, security: Security, opened: Callable[[Any], object]
) -> list[Place | Pair]:
    """Where all shards are.

    Args:
        addresses: of all shards.
        settings: where their backups are, if they have some.
        security: of the wire.
        opened: is given every channel that is opened, to close it some time.

    Raises:
        ConfigError: there are not as many backups as shards, or one has the address of a shard.
    """
    check_backups(addresses, settings)

    def place(address: str) -> Place:
        channel = connect(address, security, CHANNEL_OPTIONS)
        opened(channel)
        return channel, address

    if not settings.backups:
        return [place(address) for address in addresses]
    return [(place(first), place(second)) for first, second in zip(addresses, settings.backups, strict=True)]


def check_backups(addresses: Sequence[str], settings: PsSettings) -> None:
    """Refuses backups that do not fit the shards; errors as of `places_of`."""
    if not settings.backups:
        return
    if len(settings.backups) != len(addresses):
        raise ConfigError(
            f"ps.backups has {len(settings.backups)} addresses, but there are {len(addresses)} shards: "
            "each needs a backup, or none"
        )
    if twice := set(addresses) & set(settings.backups):
        raise ConfigError(f"ps.backups has {min(twice)}, which is the address of a shard in ps.addresses")
