"""Search over a folder of texts, for agents that look things up: SQLite's full-text index, ranked by BM25. No server and no network.

A tool of a user's own names the folder:

    from offbeat.agents.tools.search import TextIndex

    INDEX = TextIndex("wiki")

    def search(query: str) -> str:
        \"\"\"Search the encyclopedia. Args: query: a few words.\"\"\"
        return INDEX.search(query)

The index is a file beside the folder; its name holds a hash of all texts. The first process builds it, later ones and later runs only open
it, and changed texts get a new one.
"""

import contextlib
import hashlib
import json
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import DataError

SUFFIXES = (".txt", ".md", ".jsonl")
_PASSAGE_CHARS = 1200
_MOST_WORDS = 32
_SNIPPET_WORDS = 48  # FTS5 gives at most 64
_LAYOUT = b"1"
"""Part of the hash; changes with the format of the index."""


@dataclass(frozen=True)
class Hit:
    """A passage that was found.

    Attributes:
        title: heading or first line of its text.
        path: file, from the folder; of a line of a JSONL file with its number, as in facts.jsonl:3.
        snippet: the part that has most of the words.
    """

    title: str
    path: str
    snippet: str


class TextIndex:
    """An index over the passages of all .txt, .md and .jsonl files below a folder. Safe to call from several threads."""

    def __init__(self, folder: str | Path, *, cache: str | Path | None = None, num_hits: int = 5) -> None:
        """Open the index, or build it first.

        Args:
            folder: texts in UTF-8. Each line of a JSONL file is one text, an object with "text" and, if it has one, "title".
            cache: folder of the index; beside the texts, as .NAME-index, if None.
            num_hits: most passages that a search gives.

        Raises:
            DataError: there is no such folder, or no text in it, or one that cannot be read.
        """
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise DataError(f"there is no folder {str(folder)!r} to search in; a path is relative to the working directory")
        self._num_hits = num_hits
        files = sorted(path for path in self._folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        cache = Path(cache) if cache else self._folder.absolute().parent / f".{self._folder.absolute().name}-index"
        self._file = cache / f"{self._digest(files)}.sqlite"
        if not self._file.exists():
            self._build(files)

    def search(self, query: str) -> str:
        """Search for passages with these words and return the best ones as text.

        Args:
            query: a few words; the more of them a passage has, and the rarer they are, the better.
        """
        hits = self.hits(query)
        if not hits:
            return f"Nothing was found for {query[:100]!r}."
        return "\n\n".join(f"{number}. {hit.title} ({hit.path})\n{hit.snippet}" for number, hit in enumerate(hits, start=1))

    def hits(self, query: str) -> list[Hit]:
        """Return the best passages, best first; any text is a query."""
        words = re.findall(r"\w+", query)[:_MOST_WORDS]
        if not words:
            return []
        wanted = " OR ".join(f'"{word}"' for word in words)  # quoted, so that no word is an operator
        found = "SELECT title, path, snippet(passages, 1, '', '', '…', ?) FROM passages WHERE passages MATCH ?" \
                " ORDER BY bm25(passages, 4.0, 1.0), rowid LIMIT ?"
        with contextlib.closing(sqlite3.connect(f"{self._file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return [Hit(*row) for row in database.execute(found, (_SNIPPET_WORDS, wanted, self._num_hits))]

    def _digest(self, files: list[Path]) -> str:
        digest = hashlib.sha256(_LAYOUT)
        for path in files:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(self._folder)}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()[:16]

    def _build(self, files: list[Path]) -> None:
        """Write the index under another name first, so that processes that build it at the same time do not meet."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._file.parent, prefix=".building-") as building:
            made = Path(building) / "index"
            with contextlib.closing(sqlite3.connect(made)) as database, database:
                database.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, path UNINDEXED, tokenize = 'porter unicode61')")
                database.executemany(
                    "INSERT INTO passages (title, text, path) VALUES (?, ?, ?)", (row for path in files for row in self._passages(path)))
                [(num,)] = database.execute("SELECT count(*) FROM passages")
            if not num:
                raise DataError(
                    f"the folder {str(self._folder)!r} has no text to search in; it takes files that end in {', '.join(SUFFIXES)}")
            made.replace(self._file)

    def _passages(self, path: Path) -> Iterator[tuple[str, str, str]]:
        """Yield the title, the text and the place of each passage of a file."""
        name = str(path.relative_to(self._folder))
        try:
            content = path.read_text(encoding="utf-8")
            texts = [("", content, name)] if path.suffix != ".jsonl" else [
                (str(item.get("title", "")), item["text"], f"{name}:{number}")
                for number, line in enumerate(content.split("\n"), start=1) if line.strip() for item in [json.loads(line)]]
        except (ValueError, LookupError, AttributeError, TypeError) as exc:
            raise DataError(f"{str(path)!r} cannot be searched: {exc}; each line of a JSONL file is an object with \"text\"") from exc
        for title, text, place in texts:
            title = title or next((line.strip("# \t") for line in text.splitlines() if line.strip("# \t")), place)[:100]
            for passage in _split(text):
                yield title, passage, place


def _split(text: str) -> Iterator[str]:
    """Yield the text's paragraphs, small ones together and long ones cut."""
    held = ""
    for paragraph in re.split(r"\n\s*\n", text):
        for start in range(0, len(paragraph), _PASSAGE_CHARS):
            part = paragraph[start:start + _PASSAGE_CHARS].strip()
            if held and len(held) + len(part) > _PASSAGE_CHARS:
                yield held
                held = ""
            held = f"{held}\n\n{part}" if held and part else held or part
    if held:
        yield held
