"""README's picture of the console: `python -m tests.console.test_picture` renews it.

The file says which headings were on the page when it was taken. If the page has others, the picture is out of date.
"""

import struct
import zlib
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.console.conftest import Shown, looking, showing

PICTURE = Path(__file__).parents[2] / "docs" / "console.png"
_SIGNATURE, _HEADER = b"\x89PNG\r\n\x1a\n", 25  # bytes of the signature; of the chunk IHDR, which comes first


def headings(page: Page) -> str:
    """What is on the page, by its headings."""
    return "\n".join(page.locator("h1, h2, h3").all_inner_texts())


def annotated(picture: bytes, text: str) -> bytes:
    """A PNG with a text in it."""
    body = b"iTXtheadings\0\0\0\0\0" + text.encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    at = len(_SIGNATURE) + _HEADER
    return picture[:at] + chunk + picture[at:]


def annotation(picture: bytes) -> str:
    """The text of `annotated`."""
    at = len(_SIGNATURE) + _HEADER
    (size,) = struct.unpack(">I", picture[at : at + 4])
    assert picture[at + 4 : at + 16] == b"iTXtheadings"
    return picture[at + 8 : at + 8 + size].removeprefix(b"headings\0\0\0\0\0").decode()


def take(browser: Browser, shown: Shown) -> bytes:
    """A picture of the console, annotated."""
    shown.cluster.said["dead_letters"] = {"missing_field": 1204, "bad_time": 41, "not_json": 3}
    with looking(browser, shown.url) as (page, _, _):
        expect(page.locator("#chart-auc")).not_to_have_attribute("data-points", "0")
        return annotated(page.screenshot(animations="disabled"), headings(page))


def test_the_picture_shows_the_console_as_it_is(browser: Browser, shown: Shown) -> None:
    kept, now = PICTURE.read_bytes(), take(browser, shown)
    assert annotation(kept) == annotation(now), f"renew it: python -m {__spec__.name if __spec__ else __name__}"
    size = slice(len(_SIGNATURE) + 8, len(_SIGNATURE) + 16)  # width and height, in IHDR
    assert kept[size] == now[size]
    assert "AUC" in annotation(kept)


if __name__ == "__main__":
    with sync_playwright() as playwright, showing() as shown_here:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        PICTURE.write_bytes(take(chromium, shown_here))
        chromium.close()
