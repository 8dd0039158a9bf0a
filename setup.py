"""The package's description is README.md without what only the repository has: its pictures, and links to its files.

A page of a package index has no files beside it, where relative links would lead nowhere. Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

_PICTURE = re.compile(r"!\[[^]]*\]\((?![a-z]+:)[^)]*\)\n*")
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!#|[a-z]+:)[^)]*\)")

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=_LINK.sub(r"\1", _PICTURE.sub("", readme)), long_description_content_type="text/markdown")
