"""[teacher]: the template has a place for everything that it must show."""

import pytest
from pydantic import ValidationError

from offbeat.config.teacher import TeacherConfig


def test_the_default_template_shows_the_prompt_before_the_answer():
    template = TeacherConfig().template
    assert 0 <= template.index("{prompt}") < template.index("{answer}")
    assert TeacherConfig(template="{answer} {prompt} {}").template == "{answer} {prompt} {}"


@pytest.mark.parametrize(("template", "lacking"), [
    ("{prompt}", "{answer}"), ("{answer}", "{prompt}"), ("", "{prompt} and {answer}")])
def test_a_template_that_shows_not_both_is_refused(template, lacking):
    with pytest.raises(ValidationError, match=f"it lacks {lacking}"):
        TeacherConfig(template=template)


@pytest.mark.parametrize("values", [{"top_k": -1}, {"top_k": 1025}, {"max_concurrent": 0}, {"timeout_s": 0}, {"max_retries": -1}])
def test_numbers_have_bounds(values):
    with pytest.raises(ValidationError):
        TeacherConfig(**values)
