"""Hooks of MkDocs: pages from outside of docs/, pages generated from the code, and the links between all of them.

The Markdown files stay readable as they are, with relative links. On the website, a link to a file that is not a page
leads to a page that shows the file.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.core import TyperGroup

import streamtrain
from streamtrain.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Pages of the website that are not in docs/.
OUTSIDE = {
    ROOT / "README.md": "index.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "SECURITY.md": "security.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "schemas" / "README.md": "formats.md",
    ROOT / "examples" / "README.md": "examples.md",
    ROOT / "examples" / "learn.ipynb": "notebook.md",
}
API = {
    "Model": ("Schema", "Categorical", "Cross", "Numeric", "Label", "Uniform", "Constant", "Model", "load_model"),
    "Optimizers": ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "FTRL"),
    "Learning": ("Learner", "Learned", "Metrics", "ProgressiveValidation", "Batch", "BadSample"),
}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_NAMED = re.compile(r"\[(?:[\w./-]+/)?[\w-]+\.md\]\(([\w./-]+\.md)")  # a link to a page that shows its file's name
_titles: dict[str, str] = {}
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2`*$", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Headings get the anchors that GitHub gives them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor


def anchor(heading: str, separator: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that are not in docs/, and a page for each file that some page links to."""
    made = {"cli.md": cli_page(), "python.md": python_page()}
    made |= {name: _text(path) for path, name in OUTSIDE.items()}
    pages = {path: path.read_text() for path in [*DOCS.glob("*.md"), *OUTSIDE]}
    for source in {path for page, text in pages.items() for path in _linked(page, text) if _is_source(path)}:
        made[_page_of(source)] = _source_page(source)
    for path, text in pages.items():
        _titles[_page_of(path)] = next((line[2:] for line in text.splitlines() if line.startswith("# ")), path.name)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at pages of the website, and has them show titles instead of names of files."""
    uri = page.file.src_uri
    origin = next((path for path, name in OUTSIDE.items() if name == uri), DOCS / uri)
    here = Path(uri).parent

    def pointed(found: re.Match[str]) -> str:
        link, _, fragment = found[2].partition("#")
        target = (origin.parent / link).resolve()
        if not link or re.match(r"[a-z]+:", link) or not target.exists():
            return found[0]
        leads = Path(_page_of(target))
        up = "../" * len(here.parts)
        return f"{found[1]}{up}{leads.as_posix()}{'#' + fragment if fragment else ''}{found[3]}"

    def titled(found: re.Match[str]) -> str:
        title = _titles.get(found[1].removeprefix("../" * len(here.parts)))
        return f"[{title}]({found[1]}" if title else found[0]

    parts = _parts(markdown)
    return "".join(part if code else _NAMED.sub(titled, _LINK.sub(pointed, part)) for part, code in parts)


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """The text of a page, in turns outside and inside of code blocks."""
    at = 0
    for fence in _FENCE.finditer(markdown):
        yield markdown[at : fence.start()], False
        yield fence[0], True
        at = fence.end()
    yield markdown[at:], False


def _linked(page: Path, text: str) -> Iterator[Path]:
    for part, code in _parts(text):
        for link in () if code else _LINK.findall(part):
            path = link[1].partition("#")[0]
            if path and not re.match(r"[a-z]+:", path) and (page.parent / path).exists():
                yield (page.parent / path).resolve()


def _is_source(path: Path) -> bool:
    return path.is_file() and path.parent != DOCS and path not in OUTSIDE


def _page_of(path: Path) -> str:
    """The page of the website for a file, or for a folder that has a README."""
    if path.is_dir():
        path = path / "README.md"
    if path in OUTSIDE or path.parent == DOCS:
        return OUTSIDE.get(path, path.name)
    parts = (part.lstrip(".") for part in path.relative_to(ROOT).parts)  # MkDocs leaves out what starts with a dot
    return f"source/{'/'.join(parts)}.md"


def _source_page(path: Path) -> str:
    name, language = path.relative_to(ROOT), {".py": "python", ".h": "cpp", ".yml": "yaml"}.get(path.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n````{language}\n{path.read_text()}\n````\n"


def _text(path: Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    shown = [
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts, strict=True)
    ]
    return "\n\n".join(shown) + "\n"


def python_page() -> str:
    """The Python API, from docstrings."""
    grouped = {name for names in API.values() for name in names}
    errors = [name for name in streamtrain.__all__ if _is_error(name)]
    others = [name for name in streamtrain.__all__ if name not in grouped and name not in errors]
    sections = {**API, "Errors": errors, "Others": others}
    text = ["# Python API", "Everything is imported from `streamtrain`, by convention `import streamtrain as st`."]
    for title, names in sections.items():
        text += [f"## {title}", *(f"::: streamtrain.{name}" for name in names)] if names else []
    return "\n\n".join(text) + "\n"


def _is_error(name: str) -> bool:
    one = getattr(streamtrain, name)
    return isinstance(one, type) and issubclass(one, Exception)


def cli_page() -> str:
    """The commands, from their help."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    text = [
        "# Commands",
        "Every command has `--help`. The exit code is 0 on success, 2 if settings, options or files are wrong, and 1 "
        "for any other failure. [configuration.md](configuration.md) describes the settings that `--set` and "
        "`streamtrain.toml` take.",
    ]
    panels: dict[str, list[tuple[str, Any]]] = {}
    for name, command in group.commands.items():
        if not command.hidden:
            panels.setdefault(getattr(command, "rich_help_panel", None) or "Others", []).append((name, command))
    for panel, commands in panels.items():
        text.append(f"## {panel if isinstance(panel, str) else 'Others'}")
        for name, command in commands:
            text += list(_command(f"streamtrain {name}", command))
    return "\n\n".join(text) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"### {name}"
    yield _prose(command.help or command.callback.__doc__ or "")
    for sub, one in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {sub}", one)
    if hasattr(command, "commands"):
        return
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    words = [name, "[OPTIONS]"] if len(command.params) > len(arguments) else [name]
    yield "```\n" + " ".join([*words, *((one.metavar or one.name.upper()) for one in arguments)]) + "\n```"
    context = typer.Context(command, info_name=name)
    rows = [_row(one, context) for one in command.params if not getattr(one, "hidden", False)]
    if rows:
        yield "| argument or option | default | meaning |\n|---|---|---|\n" + "\n".join(rows)


def _row(one: Any, context: typer.Context) -> str:
    if one.param_type_name == "argument":
        name = f"`{one.metavar or one.name.upper()}`"
    else:
        takes = "" if one.is_flag else f" {one.metavar or one.display_type(context)}"
        name = ", ".join(f"`{opt}{takes}`" for opt in [*one.opts, *one.secondary_opts])
    default = one.default
    shown = "" if default in (None, "", (), []) or one.required or callable(default) else f"`{default}`"
    if shown and getattr(one, "is_flag", False):
        shown = "on" if default else ""
    meaning = _prose(getattr(one, "help", None) or "").replace("|", "\\|")
    return f"| {name} | {'required' if one.required else shown} | {meaning} |"


def _prose(text: str) -> str:
    """Help text without what only shapes it on terminals."""
    paragraphs = text.replace("\b", "").strip().split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)
