"""What there was before is passed over, and only then."""

import gc
import weakref

from streamtrain.memory import freeze_heap


class Ring:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_there_was_is_passed_over_until_the_end() -> None:
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
