"""Makes the site of what the repository holds beside docs/; mkdocs loads this file as a hook (mkdocs.yml).

Pages link to files outside docs/ by relative paths, which work where the repository is read. The site has no repository beside it, so every
file that a page links to becomes a page of its own under source/, and the links are rewritten. README.md, CHANGELOG.md and
CONTRIBUTING.md are also pages of the site. mkdocs checks all links, rewritten ones included.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}
"""Files at the root of the repository, and the pages of the site that stand for them."""

_LINK = re.compile(r"(?<=\]\()(?!#|[a-z]+:)([^)#\s]+)(#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json", ".jsonl": "json", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside docs/ that a page links to."""
    documents = {Path(file.abs_src_path): file for file in files.documentation_pages() if file.abs_src_path}
    for name, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
        documents[ROOT / name] = files.src_uris[uri]
    linked = {target for path in documents for target in _links_outside(path)}
    for target in sorted(linked):
        files.append(File.generated(config, _source_page(target), content=_listing(target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links that leave docs/, so that they lead to pages of the site."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    origin = next((ROOT / name for name, at in ROOT_PAGES.items() if at == uri), ROOT / "docs" / uri)

    def at_site(match: re.Match[str]) -> str:
        target = _resolve(origin, match[1])
        return os.path.relpath(_site_uri(target), Path(uri).parent) + (match[2] or "")

    return _outside_code(markdown, at_site)


def _links_outside(path: Path) -> set[Path]:
    found: set[Path] = set()

    def note(match: re.Match[str]) -> str:
        target = _resolve(path, match[1])
        if not target.is_relative_to(ROOT / "docs") and str(target.relative_to(ROOT)) not in ROOT_PAGES:
            found.add(target)
        return match[0]

    _outside_code(path.read_text(encoding="utf-8"), note)
    return found


def _outside_code(markdown: str, change: Callable[[re.Match[str]], str]) -> str:
    """Apply `change` to every relative link that is not within a fenced block."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(change, part) for part in parts)


def _resolve(origin: Path, link: str) -> Path:
    return Path(os.path.normpath(origin.parent / link))


def _site_uri(target: Path) -> str:
    name = str(target.relative_to(ROOT))
    if target.is_relative_to(ROOT / "docs"):
        return str(target.relative_to(ROOT / "docs"))
    return ROOT_PAGES.get(name) or _source_page(target)


def _source_page(target: Path) -> str:
    return f"source/{target.relative_to(ROOT)}.md"


def _listing(target: Path) -> str:
    """Return a page that shows a file, or the names in a folder. A path that does not exist raises, which ends the build."""
    title = f"# `{target.relative_to(ROOT)}`\n\n"
    if target.is_dir():
        return title + "".join(f"- `{child.name}`\n" for child in sorted(target.iterdir()) if not child.name.startswith(("_", ".")))
    text = target.read_text(encoding="utf-8")
    return text if target.suffix == ".md" else f"{title}````{_LANGUAGES.get(target.suffix, 'text')}\n{text}\n````\n"
