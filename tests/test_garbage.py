"""What there was before is passed over: for a time, for good, and at the exit."""

import gc
import subprocess
import sys
import weakref

from streamtrain.memory import freeze_heap, kept_for_good


class Ring:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_there_was_is_passed_over_until_the_end() -> None:
    gc.unfreeze()  # what was imported for the tests
    before, tracked = Ring(), len(gc.get_objects())
    gc.collect()
    exempt = gc.get_freeze_count()  # CPython 3.12 keeps objects there that never end
    gone = weakref.ref(before)
    with freeze_heap():
        assert gc.get_freeze_count() > tracked / 2
        assert len(gc.get_objects()) < tracked / 2
        del before
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
        assert gone() is not None
    gc.collect()
    assert gone() is None
    assert gc.get_freeze_count() == exempt


def test_what_is_kept_for_good_is_not_searched_and_all_that_comes_later_is() -> None:
    with kept_for_good():
        kept = weakref.ref(Ring())
        assert not gc.isenabled()
    assert gc.isenabled()
    later = weakref.ref(Ring())
    gc.collect()
    assert kept() is not None
    assert later() is None


def test_who_waits_with_the_collector_does_not_start_it() -> None:
    gc.disable()
    try:
        with kept_for_good():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_searched_at_the_exit() -> None:
    """And it comes after all else that was registered, as that may leave cycles."""
    code = """
import atexit, gc
from streamtrain.memory import exit_at_once

class Ring:
    def __init__(self):
        self.itself = self

    def __del__(self, say=print):
        say("searched")

exit_at_once()
atexit.register(Ring)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")
