"""The table of roles and keys in the documentation is the code's."""

from pathlib import Path

import pytest

from offbeat.data.chat_keys import MARKS, REFUSED, ROLES, THOUGHTS, key_lines, read_role, role_lines

PAGE = (Path(__file__).parents[2] / "docs" / "prompts.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", [*role_lines(), *key_lines()])
def test_the_documentation_has_each_row_of_the_table(line):
    assert line in PAGE.splitlines()


def test_every_name_is_read_as_one_thing():
    names = [name for known in ROLES.values() for name in known]
    assert len(set(names)) == len(names) and all(read_role(name.upper()) for name in names)
    assert not {*THOUGHTS, *MARKS} & REFUSED.keys()
