"""Memory that is free: of the machine, or below the limit of a container."""

from pathlib import Path

from streamtrain.memory import all_megabytes, free_megabytes


def group(folder: Path, limit: str) -> Path:
    """A control group that uses 300 MB, of which 100 MB are cached files."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{300 << 20}\n")
    (folder / "memory.stat").write_text(f"anon {200 << 20}\ninactive_file {100 << 20}\n")
    return folder


def test_a_container_may_use_what_is_below_its_limit(tmp_path: Path) -> None:
    assert free_megabytes(group(tmp_path, str(250 << 20))) == 50
    assert all_megabytes(tmp_path) == 250


def test_without_a_limit_it_is_that_of_the_machine(tmp_path: Path) -> None:
    free = free_megabytes(tmp_path / "none")
    assert free > 50
    assert free_megabytes(group(tmp_path, "max")) > 50
    assert all_megabytes(tmp_path) == all_megabytes(tmp_path / "none") > free
    assert abs(free_megabytes(group(tmp_path, str(1 << 60))) - free) < max(500, free // 4)
