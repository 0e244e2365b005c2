"""Assignment of partitions to the members of a group, for services that do not assign them themselves."""

from collections.abc import Iterable, Mapping, Sequence


def assign_partitions(
    members: Sequence[str], partitions: int, held: Mapping[str, Iterable[int]]
) -> dict[str, list[int]]:
    """A balanced and sticky assignment: numbers of partitions differ by one at most, and as few as possible move.

    Args:
        members: names; at least one.
        partitions: number.
        held: current partitions by member.

    Returns:
        The partitions of each member, ascending; the same for the same arguments.
    """
    names = sorted(members)
    least, over = divmod(partitions, len(names))
    mine: dict[str, list[int]] = {name: [] for name in names}
    free = set(range(partitions))
    # Members with the most partitions keep one more, if there are some over.
    for name in sorted(names, key=lambda name: (-len(set(held.get(name, ()))), name)):
        most = least + (over > 0)
        mine[name] = sorted(free.intersection(held.get(name, ())))[:most]
        over -= len(mine[name]) > least
        free -= set(mine[name])
    for partition in sorted(free):
        name = min(names, key=lambda name: (len(mine[name]), name))
        mine[name].append(partition)
    return {name: sorted(of_member) for name, of_member in mine.items()}
