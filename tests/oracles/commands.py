"""Commands of Redis on the fields of buckets, in plain Python: what the native `pack_fields` must equal."""

from collections.abc import Sequence


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def command(verb: bytes, name: bytes, fields: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % (2 + len(fields)) + b"".join(map(bulk, (verb, name, *fields)))


def name_of(before: bytes, bucket: int, after: bytes) -> bytes:
    return before + b"%06x" % bucket + after


def grouped(buckets: Sequence[int]) -> dict[int, list[int]]:
    """Indices by bucket, which ascend."""
    found: dict[int, list[int]] = {}
    for i, bucket in enumerate(buckets):
        found.setdefault(bucket, []).append(i)
    return dict(sorted(found.items()))


def last_of_each(keys: Sequence[int]) -> list[int]:
    return sorted({key: i for i, key in enumerate(keys)}.values())
