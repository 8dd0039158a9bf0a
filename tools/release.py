"""Versions: cuts the changelog, and says what a version brought. `make release VERSION=0.2.0` does all that comes before a tag.

    python tools/release.py cut 0.2.0      names what is under "Unreleased" 0.2.0, and sets that version in pyproject.toml and CITATION.cff
    python tools/release.py check v0.2.0   ends with 1 unless this tree is that version, with a section in the changelog
    python tools/release.py notes 0.2.0    prints the version's section
"""

import argparse
import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_UNRELEASED = "## Unreleased\n"
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_PLACES = {"pyproject.toml": r'^version = "(.*)"$', "CITATION.cff": r"^version: (.*)$"}
"""Files that name the version, and the line that does."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("cut", "check", "notes"))
    parser.add_argument("version", metavar="VERSION", help="such as 0.2.0; a tag's v in front of it is left out")
    args = parser.parse_args()
    version = args.version.removeprefix("v")
    if not _VERSION.fullmatch(version):
        sys.exit(f"a version has the form 0.2.0, got {args.version!r}")
    if args.do == "cut":
        cut(version, root=ROOT, today=datetime.datetime.now(tz=datetime.UTC).date())
    elif args.do == "check":
        check(version, root=ROOT)
    else:
        print(notes(version, root=ROOT), end="")


def cut(version: str, *, root: Path, today: datetime.date) -> None:
    """Give what is unreleased a version; ends the program, with nothing changed, if there is nothing or the version is there already."""
    changelog = root / "CHANGELOG.md"
    before, found, rest = changelog.read_text(encoding="utf-8").partition(_UNRELEASED)
    if _section(rest, version) is not None:
        sys.exit(f"CHANGELOG.md has a section of {version} already")
    if not found or not rest.partition("\n## ")[0].strip():
        sys.exit('CHANGELOG.md has nothing under "## Unreleased"')
    changelog.write_text(f"{before}{_UNRELEASED}\n## {version} ({today.isoformat()})\n{rest}", encoding="utf-8")
    for name, line in _PLACES.items():
        text = (root / name).read_text(encoding="utf-8")
        changed = re.sub(line, lambda match: match[0].replace(match[1], version), text, count=1, flags=re.MULTILINE)
        (root / name).write_text(changed, encoding="utf-8")


def check(version: str, *, root: Path) -> None:
    """End the program unless all files name the version and the changelog has its section."""
    for name, line in _PLACES.items():
        if (found := re.search(line, (root / name).read_text(encoding="utf-8"), re.MULTILINE)) is None or found[1] != version:
            sys.exit(f"{name} names {found[1] if found else 'no version'}, not {version}; python tools/release.py cut {version}")
    notes(version, root=root)


def notes(version: str, *, root: Path) -> str:
    """Return the section of a version, without its heading; ends the program if there is none."""
    if (section := _section((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)) is None:
        sys.exit(f"CHANGELOG.md has no section of {version}; python tools/release.py cut {version}")
    return section


def _section(changelog: str, version: str) -> str | None:
    found = re.search(rf"^## {re.escape(version)} [^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return None if found is None else found[1].strip() + "\n"


if __name__ == "__main__":
    main()
