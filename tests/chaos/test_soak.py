"""What a soak measures, and draws."""

import os
import sys
import threading
from subprocess import PIPE, Popen
from xml.etree import ElementTree

import pytest

from tests.chaos.figures import Figures, figure_of, slope
from tests.chaos.plot import draw
from tests.chaos.soak import about
from tests.patience import until


def test_memory_that_grows_shows() -> None:
    before = figure_of(os.getpid(), 0.0)
    held = bytearray(os.urandom(64 << 20))
    after = figure_of(os.getpid(), 3600.0)
    assert before is not None
    assert after is not None
    assert 50 < after.mb - before.mb < 200, len(held)
    assert slope([(f.at, f.mb) for f in (before, after, after)]) == pytest.approx(after.mb - before.mb, abs=1e-3)
    assert about([before, after], [])["mb_most"] == round(max(before.mb, after.mb), 1)


OPENS_WHEN_TOLD = """
import os, sys
print("started", flush=True)
sys.stdin.readline()
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
sys.stdin.read()
"""


def test_open_files_are_counted_until_a_process_ends() -> None:
    with Popen([sys.executable, "-c", OPENS_WHEN_TOLD], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        figures = Figures(lambda: {"it": process.pid, "nobody": 1 << 22}, every=0.01)
        figures.start()
        until(lambda: figures.of.get("it"))
        process.stdin.write(b"\n")
        process.stdin.flush()
        until(lambda: figures.of["it"][-1].files == figures.of["it"][0].files + 100)
        process.stdin.close()
        process.wait()
        seen = len(figures.of["it"])
        figures.stop()
    assert len(figures.of["it"]) <= seen + 1
    assert "nobody" not in figures.of
    assert not [one for one in threading.enumerate() if one.name == "figures"]


def test_a_slope_is_by_least_squares() -> None:
    assert slope([(0, 1.0), (1800, 2.0), (3600, 3.0)]) == pytest.approx(2.0)
    assert slope([(0, 1.0), (10, 1.0), (20, 1.0)]) == pytest.approx(0.0)
    assert slope([(0, 1.0), (10, 5.0)]) == 0.0


def test_a_picture_has_all_lines() -> None:
    text = draw(
        {"memory, MB": {"ps<0>": [(0, 1.0), (60, 2.0)], "ps1": [(at, 0.0) for at in range(60)]}, "lag": {}},
        'what "is" shown',
    )
    lines = [one for one in ElementTree.fromstring(text).iter() if one.tag.endswith("polyline")]
    assert [one.attrib["points"] for one in lines] == ["70.0,134.0 700.0,44.0", "70.0,224.0 689.5,224.0"]
