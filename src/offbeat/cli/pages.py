"""`offbeat docs [PAGE]`: prints a page of the documentation, which the wheel brings along, or the list of all pages."""

import argparse
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from offbeat.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "pages", _PACKAGE.parents[1] / "docs")
"""Folders of the pages: in a wheel, into which setup.py copies them, and in a clone of the repository."""

DESCRIPTION = """\
Print a page of the documentation as Markdown, or without PAGE the list of all pages. Messages and settings name pages in this way.
"""

EXAMPLES = """\
examples:
  offbeat docs
  offbeat docs debugging | less
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("page", metavar="PAGE", nargs="?", default="", help="name of a page, such as debugging")


def run(args: argparse.Namespace) -> int:
    """Print a page, or a line for each page; raises ConfigError if there is no such page, or settings were given, which no page uses."""
    pages = find_pages()
    if not args.page:
        width = max(map(len, pages))
        print("\n".join(f"{name:<{width}}  {_title(path)}" for name, path in pages.items()))
        return 0
    name = Path(args.page).stem  # a link of a page, such as docs/debugging.md, is understood, too
    if name not in pages:
        near = get_close_matches(name, pages, n=1)
        raise ConfigError(f"{args.page!r} is not a page; " + (f"did you mean {near[0]}?" if near else "'offbeat docs' lists them"))
    print(pages[name].read_text(encoding="utf-8"), end="")
    return 0


def find_pages() -> Mapping[str, Path]:
    """Return the pages by name, such as "debugging", the start page first."""
    folder = next(place for place in _PLACES if (place / "index.md").is_file())
    paths = sorted(folder.glob("*.md"), key=lambda path: (path.stem != "index", path.stem))
    return {path.stem: path for path in paths}


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "")
