"""Two things that pyproject.toml cannot say: the package's description, and that the wheel brings the pages of docs/ along.

The description is README.md without what only the repository has: its pictures, and links to its files. A page of a package index has no
files beside it, where relative links would lead nowhere. `offbeat docs` prints the pages, which texts of the package name.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_PICTURE = re.compile(r"!\[[^]]*\]\((?![a-z]+:)[^)]*\)\n*")
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!#|[a-z]+:)[^)]*\)")
_ROOT = Path(__file__).parent


class BuildWithPages(build_py):
    """Copies docs/*.md to offbeat/pages, unless the package is installed as it lies in a clone, where docs/ is beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "offbeat", "pages")
            self.mkpath(str(folder))
            for page in sorted(_ROOT.glob("docs/*.md")):
                self.copy_file(str(page), str(folder / page.name))


setup(
    long_description=_LINK.sub(r"\1", _PICTURE.sub("", (_ROOT / "README.md").read_text(encoding="utf-8"))),
    long_description_content_type="text/markdown", cmdclass={"build_py": BuildWithPages})
