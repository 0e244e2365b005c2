"""The website of the documentation: it builds without warnings, its links lead somewhere, it loads nothing remote."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer.main
from typer.core import TyperGroup

import streamtrain
from streamtrain.cli import app

pytest.importorskip("mkdocs", reason="the website needs the extra `docs`")

ROOT = Path(__file__).parent.parent
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Read(HTMLParser):
    """What a page of the website has: anchors, links, and addresses of what a browser loads for it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = {""}, set[str](), set[str]()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if LOADED.get(tag) in values:
            self.loaded.add(values[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The website, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Read]:
    return {page: Read(page) for page in site.rglob("*.html") if page.name != "404.html"}


def broken(pages: dict[Path, Read]) -> Iterator[str]:
    """Links within the website that lead nowhere."""
    for page, read in pages.items():
        for link in read.links | read.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.exists() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                yield f"{page.name}: {link}"


def test_links_and_anchors_lead_somewhere(pages: dict[Path, Read]) -> None:
    assert sum(len(read.links) for read in pages.values()) > 1000
    assert sorted(broken(pages)) == []


def test_links_to_pages_show_their_titles(pages: dict[Path, Read]) -> None:
    for page in pages:
        assert not re.search(r"<a [^>]*>(?:docs/)?[\w-]+\.md</a>", page.read_text()), page.name


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text('<h1 id="here"></h1><a href="#here"></a><a href="#there"></a><img src="none.svg">')
    assert sorted(broken({page: Read(page)})) == ["a.html: #there", "a.html: none.svg"]


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Read]) -> None:
    assert {address for read in pages.values() for address in read.loaded if urlsplit(address).netloc} == set()


def test_every_page_is_in_the_navigation(site: Path, pages: dict[Path, Read]) -> None:
    listed = {(site / urlsplit(link).path).resolve() for link in pages[site / "index.html"].links if "://" not in link}
    assert {page for page in site.glob("*.html") if page.name != "404.html"} <= listed | {site / "index.html"}


def test_every_command_and_option_is_on_its_page(site: Path) -> None:
    text, group = (site / "cli.html").read_text(), typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name, command in group.commands.items():
        section = re.search(rf'<h3 id="streamtrain-{name}">.*?(?=<h3|</article>)', text, re.DOTALL)
        assert section, name
        if not isinstance(command, TyperGroup):
            for one in command.params:
                if getattr(one, "hidden", False):
                    continue
                assert one.opts[0].lower() in section[0].lower(), f"{name} {one.opts}"


def test_the_python_api_is_on_its_page(site: Path) -> None:
    read = Read(site / "python.html")
    for name in streamtrain.__all__:
        assert {
            anchor for anchor in read.anchors if anchor.startswith("streamtrain.") and anchor.endswith(f".{name}")
        }, name
    text = (site / "python.html").read_text()
    assert "micro_batch_size" in text
    assert "Samples of a step" in text or "samples of a step" in text
