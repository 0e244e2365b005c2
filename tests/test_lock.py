"""The locks of the image, tests and wheels have what pyproject.toml asks for, in allowed versions, and have hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
ALL, DEV, WHEELS = ROOT / "requirements.lock", ROOT / ".ci" / "dev.lock", ROOT / ".ci" / "wheels.lock"
FULL, SLIM = ROOT / "services" / "full.lock", ROOT / "services" / "slim.lock"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {
    ALL: ("demo", "formats", "buckets"),
    DEV: ("demo", "docs", "formats", "buckets", "dev"),
    FULL: ("demo", "formats", "buckets"),
    SLIM: ("formats", "buckets"),
}


each_lock = pytest.mark.parametrize("lock", [ALL, DEV, FULL, SLIM, WHEELS], ids=lambda lock: lock.name)


def locked(lock: Path) -> dict[str, list[Requirement]]:
    """Requirements by name; several where they depend on the machine."""
    found: dict[str, list[Requirement]] = {}
    for line in re.findall(r"^(\w\S*==[^\\\n]+)", lock.read_text(), re.MULTILINE):
        one = Requirement(line.strip())
        found.setdefault(canonicalize_name(one.name), []).append(one)
    return found


def wanted(lock: Path) -> list[Requirement]:
    if lock == WHEELS:
        return [Requirement(text) for text in PYPROJECT["dependency-groups"]["wheels"]]
    project = PYPROJECT["project"]
    extras = (one for extra in EXTRAS[lock] for one in project["optional-dependencies"][extra])
    texts = [*project["dependencies"], *extras]
    return [one for one in map(Requirement, texts) if one.name != project["name"]]


@each_lock
def test_it_satisfies_what_is_asked_for(lock: Path) -> None:
    there = locked(lock)
    assert len(there) >= (8 if lock == WHEELS else 50)
    for one in wanted(lock):
        versions = [next(iter(entry.specifier)).version for entry in there[canonicalize_name(one.name)]]
        assert all(version in one.specifier for version in versions), f"{one}: {versions}; renew it: make lock"


def test_wheels_are_built_with_what_the_sdist_asks_for() -> None:
    assert set(PYPROJECT["build-system"]["requires"]) <= set(PYPROJECT["dependency-groups"]["wheels"])


@each_lock
def test_everything_is_of_one_version_and_has_hashes(lock: Path) -> None:
    entries = re.split(r"^(?=\w)", lock.read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == sum(len(same) for same in locked(lock).values())
    for entry in entries:
        assert re.match(r"[\w.-]+(\[[\w,]+\])?==\S+", entry), entry[:80]
        assert re.findall(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:80]


def test_images_have_what_is_locked() -> None:
    text = (ROOT / "services" / "Dockerfile").read_text()
    assert all(f"--require-hashes --requirement services/{lock.name}" in text for lock in (FULL, SLIM))
    assert all(f"--extra {extra}" in (ROOT / "Makefile").read_text() for extra in EXTRAS[ALL])


def test_tests_and_images_have_the_same_versions() -> None:
    everything, tests = versions(ALL), versions(DEV)
    assert not {name: of for name, of in everything.items() if not tests[name] <= of}
    for lock in (FULL, SLIM):
        found = versions(lock)
        assert found.pop("tensorflow-cpu", everything["tensorflow"]) == everything["tensorflow"]
        assert not {name: of for name, of in found.items() if of != everything[name]}


def test_images_have_no_tensorflow_that_they_do_not_need() -> None:
    def on(machine: str, lock: Path) -> set[str]:
        where = {"platform_machine": machine, "sys_platform": "linux"}
        there = locked(lock).items()
        return {name for name, of in there if any(not one.marker or one.marker.evaluate(where) for one in of)}

    for machine, name in (("x86_64", "tensorflow-cpu"), ("aarch64", "tensorflow")):
        assert {"tensorflow", "tensorflow-cpu"} & on(machine, FULL) == {name}
        assert not {"tensorflow", "tensorflow-cpu", "keras", "pandas"} & on(machine, SLIM)


def versions(lock: Path) -> dict[str, set[str]]:
    return {name: {str(one.specifier) for one in entries} for name, entries in locked(lock).items()}
