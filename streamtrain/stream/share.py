"""How the members of a group share the partitions of a topic, where the service itself does not see to it."""

from collections.abc import Iterable, Mapping, Sequence


def share(members: Sequence[str], partitions: int, held: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Gives every partition to one member, evenly to within one, and leaves as many as possible where they are.

    Args:
        members: by name; at least one.
        partitions: how many there are.
        held: what members have now.

    Returns:
        The partitions of each member, ascending. All who call it with the same arguments come to the same.
    """
    names = sorted(members)
    least, over = divmod(partitions, len(names))
    mine: dict[str, list[int]] = {name: [] for name in names}
    free = set(range(partitions))
    # Who has most keeps one more, if there are members that get one more.
    for name in sorted(names, key=lambda name: (-len(set(held.get(name, ()))), name)):
        most = least + (over > 0)
        mine[name] = sorted(free.intersection(held.get(name, ())))[:most]
        over -= len(mine[name]) > least
        free -= set(mine[name])
    for partition in sorted(free):
        name = min(names, key=lambda name: (len(mine[name]), name))
        mine[name].append(partition)
    return {name: sorted(of_member) for name, of_member in mine.items()}
