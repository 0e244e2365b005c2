"""Epochs: the newest that is whole is found, whatever has happened to others, and old ones go without harm."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamtrain.errors import CheckpointCorrupt, CheckpointError, ConfigError
from streamtrain.store.checkpoint.checkpoint import commit, write_part
from streamtrain.store.checkpoint.epochs import CheckpointChain, Epochs
from streamtrain.store.checkpoint.parquet import RowPart
from streamtrain.store.files import Directory
from tests.store.checkpoint.checkpoints import apply, content_of, delete, files_of, first_of, keys, set_content, table

FILE = "tables/item/shard-0.parquet"


def row(key: int, value: float) -> RowPart:
    one = np.ones(1, np.uint32)
    return RowPart(keys(key), np.full((1, 1), value, np.float32), np.zeros((1, 0), np.float32), one, one)


def add(root: str, base: int | None = None, *, gone: tuple[int, ...] = (), shards: int = 2, number: int = 0) -> int:
    """Write an epoch whose shard s says of keys s and 10 * epoch + s that their value is the epoch."""
    epochs = Epochs(root)
    number = number or epochs.next()
    parts = [
        write_part(
            epochs.directory(number),
            s,
            {"dense": np.full(1, number, np.float32)},
            [table([row(s, number), row(10 * number + s, number)], "item", 1, 0)],
            tombstones={"item": [keys(key + s) for key in gone]},
            about={"clock": number},
        )
        for s in range(shards)
    ]
    kind: Any = "full" if base is None else "delta"
    commit(epochs.directory(number), {"epoch": number}, parts, kind=kind, base=base)
    return number


def url_of(root: str, number: int) -> str:
    return f"{root}/epoch-{number:09d}"


def damage(root: str, number: int, name: str = FILE) -> None:
    content = bytearray(content_of(url_of(root, number), name))
    content[len(content) // 2] ^= 1
    set_content(url_of(root, number), name, bytes(content))


def unfinished(root: str, number: int) -> None:
    write_part(Epochs(root).directory(number), 0, {}, [])


def there(root: str) -> list[str]:
    return Directory(root).names()


def newest(root: str, **options: Any) -> int | None:
    chain = Epochs(root).newest_good(**options)
    return chain.epoch if chain else None


# --- numbers ---


def test_root_that_is_not_there_yet(place: str) -> None:
    epochs = Epochs(place)
    assert (epochs.numbers(), epochs.next(), epochs.newest_good(), epochs.retain(1)) == ([], 1, None, [])
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*epoch-000000001"):
        epochs.open(1)


def test_epochs_are_numbered(place: str) -> None:
    assert [add(place), add(place), add(place, number=1_000_000_000), add(place)] == [1, 2, 10**9, 10**9 + 1]
    unfinished(place, 10**9 + 5)
    epochs = Epochs(place)
    assert epochs.numbers() == [1, 2, 10**9, 10**9 + 1]
    assert epochs.next() == 10**9 + 6
    assert epochs.directory(12).url == f"{place}/epoch-000000012"


@pytest.mark.parametrize("name", ["epoch-12", "epoch-0000000000012", "epoch-00000001x", "Epoch-000000012", "precious"])
def test_other_names_are_left_alone(place: str, name: str) -> None:
    set_content_of_new(f"{place}/{name}", "manifest.json")
    set_content_of_new(place, "notes.txt")
    add(place)
    add(place)
    assert Epochs(place).numbers() == [1, 2]
    assert Epochs(place).retain(1) == [1]
    assert files_of(f"{place}/{name}") == ["manifest.json"]
    assert content_of(place, "notes.txt") == b"mine"


def set_content_of_new(url: str, name: str) -> None:
    Directory(url).put(name, b"mine")


# --- chains ---


def test_changes_come_in_order(place: str) -> None:
    add(place)
    add(place, 1, gone=(0, 10))
    add(place, 2, gone=(20,))
    chain = Epochs(place).open(3)
    assert chain.epochs == [1, 2, 3]
    assert (chain.epoch, chain.url, chain.about, chain.shards) == (
        3,
        url_of(place, 3),
        {"epoch": 3},
        [{"clock": 3}] * 2,
    )
    assert chain.arrays(1)["dense"].tolist() == [3]
    assert apply(chain.changes("item")) == {0: 3, 1: 3, 30: 3, 31: 3}
    assert apply(chain.changes("item", [1])) == {1: 3, 31: 3}
    assert list(chain.changes("user")) == []


@given(chain=st.lists(st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_newest_first_is_the_same_as_all_in_order(
    tmp_path_factory: pytest.TempPathFactory, chain: list[tuple[set[int], set[int]]]
) -> None:
    """Whatever goes and comes again, and whether it was there or not."""
    epochs = Epochs(str(tmp_path_factory.mktemp("chain")))
    for number, (written, gone) in enumerate(chain, 1):
        rows = [row(key, number) for key in sorted(written)]
        removed = {"item": [keys(key) for key in sorted(gone)]} if number > 1 else {}
        directory = epochs.directory(number)
        part = write_part(directory, 0, {}, [table(rows, "item", 1, 0)], tombstones=removed, about={})
        kind: Any = "full" if number == 1 else "delta"
        commit(directory, {}, [part], kind=kind, base=number - 1 or None)
    found = epochs.open(len(chain))
    assert first_of(found.rows("item")) == apply(found.changes("item"))


def test_a_manifest_is_read_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a chain may be long, and each takes a request of the store."""
    add(place)
    for base in range(1, 12):
        add(place, base)
    read, asked = Directory.read_if_there, []

    def counted(directory: Directory, name: str) -> bytes | None:
        asked.append(directory.url)
        return read(directory, name)

    monkeypatch.setattr(Directory, "read_if_there", counted)
    assert Epochs(place).open(12).epochs == [*range(1, 13)]
    assert Epochs(place).retain(5) == []
    assert sorted(asked) == sorted(2 * [url_of(place, number) for number in range(1, 13)])


def test_row_that_was_removed_and_came_again_is_there(place: str) -> None:
    """The tombstones of a delta come before its rows."""
    add(place)
    add(place, 1, gone=(0,))
    assert apply(Epochs(place).open(2).changes("item"))[0] == 2
    assert first_of(Epochs(place).open(2).rows("item"))[0] == 2


def test_the_newest_rows_come_first(place: str) -> None:
    add(place)
    for base in range(1, 6):
        add(place, base, gone=(0, 10 * base))
        chain = Epochs(place).open(base + 1)
        for shards in (None, [0], [1]):
            assert first_of(chain.rows("item", shards)) == apply(chain.changes("item", shards))
    assert next(chain.rows("item")).embeddings[0, 0] == 6
    assert list(chain.rows("user")) == []


def test_full_checkpoint_ends_the_chain(place: str) -> None:
    add(place)
    add(place)
    add(place, 2)
    assert Epochs(place).open(3).epochs == [2, 3]


@pytest.mark.parametrize("base", [1, 2, 3, 9])
def test_delta_whose_base_is_not_there(place: str, base: int) -> None:
    """Also one that builds on itself, or on a later one."""
    unfinished(place, 1)
    add(place, base, number=3 if base != 2 else 4)
    number = Epochs(place).numbers()[0]
    with pytest.raises(CheckpointCorrupt, match=f"epoch-00000000{number} builds on epoch {base}, which does not exist"):
        Epochs(place).open(number)


def test_delta_of_another_number_of_shards(place: str) -> None:
    add(place)
    add(place, 1, shards=3)
    with pytest.raises(CheckpointCorrupt, match="has 3 shards, but its base, epoch 1, has 2"):
        Epochs(place).open(2)


# --- the newest that is good ---


def test_newest_is_taken(place: str) -> None:
    add(place)
    add(place, 1)
    unfinished(place, 3)
    assert newest(place) == 2


@pytest.mark.parametrize("name", [FILE, "shards/1.safetensors", "manifest.json"])
def test_damaged_one_is_named_and_an_older_one_used(place: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        add(place)
    damage(place, 2, name)
    damage(place, 3, name)
    epochs = Epochs(place)
    with caplog.at_level(logging.WARNING):
        chain = epochs.newest_good()
    assert chain is not None
    assert chain.epoch == 1
    assert [f"epoch-00000000{3 - i}/{name}" in epochs.damaged[i] for i in range(2)] == [True, True]
    assert [record.message for record in caplog.records] == [f"{m}; using epoch 1 instead" for m in epochs.damaged]
    assert apply(chain.changes("item")) == {0: 1, 1: 1, 10: 1, 11: 1}


def test_damaged_base_spoils_what_builds_on_it(place: str) -> None:
    add(place)
    add(place)
    add(place, 2)
    add(place, 3)
    damage(place, 2)
    epochs = Epochs(place)
    chain = epochs.newest_good()
    assert chain is not None
    assert chain.epoch == 1
    assert len(epochs.damaged) == 3
    assert all(f"epoch-000000002/{FILE} is damaged" in message for message in epochs.damaged)


def test_missing_base_spoils_what_builds_on_it(place: str) -> None:
    for base in (None, None, 2, 3):
        add(place, base)
    delete(url_of(place, 3), "manifest.json")
    assert newest(place) == 2


def test_all_are_damaged(place: str, caplog: pytest.LogCaptureFixture) -> None:
    add(place)
    damage(place, 1)
    epochs = Epochs(place)
    assert epochs.newest_good() is None
    assert len(epochs.damaged) == 1
    assert "there is no older epoch" in caplog.text


def test_one_that_is_not_accepted_is_passed_by(place: str) -> None:
    for _ in range(3):
        add(place)
    damage(place, 3)
    epochs = Epochs(place)
    chain = epochs.newest_good(lambda chain: chain.about["epoch"] < 2)
    assert chain is not None
    assert chain.epoch == 1
    assert epochs.damaged == []  # what is not accepted is not verified


def test_error_of_accept_passes(place: str) -> None:
    add(place)

    def refuse(chain: CheckpointChain) -> bool:
        raise ConfigError(f"{chain.url} is of another model")

    with pytest.raises(ConfigError, match="epoch-000000001 is of another model"):
        Epochs(place).newest_good(refuse)


def test_some_shards_are_verified(place: str) -> None:
    add(place)
    add(place)
    damage(place, 2)
    for shard, epoch in ((1, 2), (0, 1)):

        def verified(chain: CheckpointChain, shard: int = shard) -> int:
            chain.verify([shard])
            return chain.epoch

        assert Epochs(place).first_good(verified) == epoch


def test_damage_is_found_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that many deltas share is read once, not once for each."""
    add(place)
    for base in range(1, 6):
        add(place, base)
    damage(place, 6, "shards/1.safetensors")
    damage(place, 5, "shards/1.safetensors")
    read: list[str] = []
    facts = Directory.facts

    def count(self: Directory, name: str) -> Any:
        read.append(f"{self.url}/{name}")
        return facts(self, name)

    monkeypatch.setattr(Directory, "facts", count)
    assert newest(place) == 4
    assert len(read) == len(set(read))


def test_place_out_of_reach_is_no_damage(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older epoch would lose what has been learned since, for nothing."""
    add(place)
    add(place)

    def fail(self: Directory, name: str) -> Any:
        with self.reading(name):
            raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(Directory, "facts", fail)
    epochs = Epochs(place)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Connection timed out") as caught:
        epochs.newest_good()
    assert not isinstance(caught.value, CheckpointCorrupt)


# --- retention ---


def test_oldest_go(place: str) -> None:
    for _ in range(5):
        add(place)
    assert Epochs(place).retain(2) == [1, 2, 3]
    assert there(place) == ["epoch-000000004", "epoch-000000005"]
    assert Epochs(place).retain(2) == []
    assert newest(place) == 5


def test_what_a_kept_delta_builds_on_stays(place: str) -> None:
    for base in (None, None, 2, 3, 4):
        add(place, base)
    assert Epochs(place).retain(1) == [1]
    assert apply(Epochs(place).open(5).changes("item")).keys() == {0, 1, 20, 21, 30, 31, 40, 41, 50, 51}


def test_unfinished_ones_go_once_there_is_a_newer_one(place: str) -> None:
    unfinished(place, 1)
    add(place)
    unfinished(place, 3)
    add(place)
    unfinished(place, 5)
    assert Epochs(place).retain(9) == [1, 3]
    assert there(place) == [f"epoch-00000000{n}" for n in (2, 4, 5)]


def test_only_unfinished_ones(place: str) -> None:
    unfinished(place, 1)
    assert Epochs(place).retain(1) == []
    assert there(place) == ["epoch-000000001"]


def test_damaged_manifest_does_not_push_a_good_one_out(place: str) -> None:
    for _ in range(4):
        add(place)
    set_content(url_of(place, 4), "manifest.json", b"{")
    delete(url_of(place, 2), "manifest.json")
    assert Epochs(place).retain(1) == [1, 2]
    assert newest(place) == 3


@pytest.mark.parametrize("keep", [0, -1])
def test_something_is_kept(place: str, keep: int) -> None:
    add(place)
    with pytest.raises(ConfigError, match="keep must be at least 1"):
        Epochs(place).retain(keep)
    assert newest(place) == 1


def test_half_a_deletion_is_never_seen(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        add(place)
    delete_all = Directory.delete_all

    def fail(self: Directory) -> None:
        with self.writing("", "delete"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(Directory, "delete_all", fail)
    with pytest.raises(CheckpointError, match=r"cannot delete .*epoch-000000001: .*Input/output error"):
        Epochs(place).retain(1)
    assert Epochs(place).numbers() == [2, 3]
    monkeypatch.setattr(Directory, "delete_all", delete_all)
    assert Epochs(place).retain(1) == [1, 2]


def test_failed_write_leaves_older_epochs_good(tmp_path: Path) -> None:
    add(str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot write"):
        write_part(Epochs(tmp_path).directory(2), 0, {}, [table([row(0, 1)], "item", 7)])
    assert newest(str(tmp_path)) == 1
    assert add(str(tmp_path)) == 3


@given(st.lists(st.sampled_from(["full", "delta", "unfinished"]), max_size=10), st.integers(1, 4))
@settings(max_examples=30)
def test_retention_keeps_the_newest_whole(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], keep: int
) -> None:
    root = f"memory://{tmp_path_factory.mktemp('retention')}"
    complete: list[int] = []
    for number, kind in enumerate(kinds, 1):
        if kind == "unfinished":
            unfinished(root, number)
        else:
            add(root, complete[-1] if complete and kind == "delta" else None, shards=1, number=number)
            complete.append(number)
    epochs = Epochs(root)
    before = {number: apply(epochs.open(number).changes("item")) for number in complete[-keep:]}
    epochs.retain(keep)
    for number, rows in before.items():
        chain = epochs.open(number)
        chain.verify()
        assert apply(chain.changes("item")) == rows
    needed = {one for number in before for one in epochs.open(number).epochs}
    assert set(epochs.numbers()) == needed
