"""A real browser, and a server for it to look at."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import pytest
from playwright.sync_api import Browser, Error, Page, ViewportSize, sync_playwright

from streamtrain.serve.registry import Registry
from tests.console.shown import Told, model_of, origin_of, registry_of, told
from tests.patience import PATIENCE
from tests.serve.running import serving
from tests.stream.servers import missing

MODEL = model_of()


@pytest.fixture(scope="package")  # no longer: its event loop is in the way of others
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        except Error as exc:
            missing("chromium", exc)
        yield started
        started.close()


class Shown(NamedTuple):
    """A server that browsers look at.

    Attributes:
        client: of its API.
        url: of its page.
        registry: of its publications.
        cluster: what it is told.
    """

    client: httpx.Client
    url: str
    registry: Registry
    cluster: Told


@contextmanager
def showing(**options: Any) -> Iterator[Shown]:
    """A server with a cluster that tells."""
    registry, cluster = registry_of(MODEL, origin_of(MODEL)), told()
    with serving(registry, cluster=cluster, **options) as client:
        yield Shown(client, str(client.base_url), registry, cluster)


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    """A server that tests of the module share: they promote nothing."""
    with showing() as one:
        yield one


class Window(NamedTuple):
    """A page, and what it said and asked for."""

    page: Page
    said: list[str]
    asked: list[str]


@contextmanager
def looking(browser: Browser, url: str, *, width: int = 1280, dark: bool = False) -> Iterator[Window]:
    """A new page at a URL, with a session of its own; its errors are collected."""
    viewport: ViewportSize = {"width": width, "height": 800}
    context = browser.new_context(viewport=viewport, color_scheme="dark" if dark else "light")
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    window = Window(page, [], [])
    page.on("console", lambda one: window.said.append(one.text) if one.type in ("error", "warning") else None)
    page.on("pageerror", lambda one: window.said.append(str(one)))
    page.on("request", lambda one: window.asked.append(one.url))
    page.goto(url)
    state = page.get_by_text("serving", exact=True).or_(page.get_by_text("nothing loaded", exact=True))
    state.or_(page.locator("details.operation").first).wait_for()
    yield window
    context.close()
