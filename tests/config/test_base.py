"""The base of all sections."""

import math

import pytest
from pydantic import ValidationError

from offbeat.config.base import EXAMPLES, Change, Section, Setting, declared, field
from offbeat.config.load import settings


class Example(Section):
    """A section."""

    size: float = field(1.0, "A size.", gt=0)


def test_sections_are_frozen():
    with pytest.raises(ValidationError):
        Example().size = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("values", [{"sise": 1.0}, {"size": 0.0}, {"size": math.inf}, {"size": math.nan}])
def test_unknown_keys_values_out_of_range_and_values_that_are_not_finite_are_refused(values):
    with pytest.raises(ValidationError):
        Example(**values)


def test_a_default_out_of_range_is_refused_too():
    class Wrong(Section):
        size: int = field(0, "A size.", ge=1)

    with pytest.raises(ValidationError):
        Wrong()


def test_every_setting_of_the_project_has_a_sentence():
    for key, info in settings():
        assert info.description and info.description.endswith("."), key


class Inner(Section):
    """A table."""

    read_by = ("sft",)

    rate: float = field(1.0, "A rate.", basic=True)
    folder: str = field("", "A folder.", on_resume=Change.FREE, read_by=("rl",))


class Outer(Section):
    """A section with tables."""

    on_resume = Change.TOLD

    count: int = field(1, "A count.", basic=True)
    strict: Inner = field(Inner(), "A table.", on_resume=Change.REFUSED)
    plain: Inner = field(Inner(), "The same table.", basic=False)


def test_a_field_answers_before_its_section_and_that_before_the_field_that_holds_it():
    found = {setting.key: setting for setting in declared(Outer)}
    assert {key: setting.on_resume for key, setting in found.items()} == {
        "count": Change.TOLD, "strict.rate": Change.REFUSED, "strict.folder": Change.FREE, "plain.rate": Change.TOLD,
        "plain.folder": Change.FREE}
    assert found["count"].read_by is None
    assert found["strict.rate"].read_by == ("sft",) and found["strict.folder"].read_by == ("rl",)


@pytest.mark.parametrize(("words", "parts"), [
    (None, {"rl", "sft", "preference"}), (("rl",), {"rl"}), (("sft",), {"sft"}), ((EXAMPLES,), {"sft", "preference"}),
    (("rl", "sft"), {"rl", "sft"})])
def test_a_setting_is_read_by_the_parts_that_it_names(words: tuple[str, ...] | None, parts: set[str]) -> None:
    setting = Setting("a.b", Example.model_fields["size"], None, words, False)
    assert {part for part in ("rl", "sft", "preference") if setting.is_read_by(part)} == parts


def test_a_table_that_is_not_basic_has_no_basic_settings():
    assert [setting.key for setting in declared(Outer) if setting.basic] == ["count", "strict.rate"]


def test_a_setting_without_an_answer_has_none():
    assert [setting.on_resume for setting in declared(Example)] == [None]
