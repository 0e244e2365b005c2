"""Folders for rows on disk: they have to be on one."""

import resource
from pathlib import Path

import pytest

from streamtrain.disk import file_system, rows_folder
from streamtrain.errors import ConfigError


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ps.disk: no files for rows can be made in .*/none: No such file"):
        rows_folder(str(tmp_path / "none"), "ps.disk")


def test_a_folder_in_memory_is_refused() -> None:
    if file_system("/dev/shm") != "tmpfs":
        pytest.skip("there is no tmpfs at /dev/shm")
    with pytest.raises(ConfigError, match=r"/dev/shm is itself in memory \(tmpfs\); set ps.disk to a folder on a disk"):
        rows_folder("/dev/shm", "ps.disk")


def test_by_default_it_is_the_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("streamtrain.disk.file_system", lambda folder: "ext4")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 32  # that this process can go on with
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        assert rows_folder(None, "ps.disk") == str(tmp_path)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few, "each file is one of many"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not list(tmp_path.iterdir())
