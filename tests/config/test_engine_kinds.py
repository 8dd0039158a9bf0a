"""Rules ask for what a kind of engine can do."""

from offbeat.config.engine_kinds import ENGINE_KINDS, kinds_that, kinds_with_form
from offbeat.config.root import Config


def test_the_kinds_with_an_ability_are_named_in_the_order_of_the_table() -> None:
    assert (kinds_that("sleeps"), kinds_that("splits"), kinds_that("inside")) == ("embedded and vllm", "vllm and sglang", "embedded")


def test_the_kinds_that_round_to_a_form_are_named() -> None:
    assert [kinds_with_form(form) for form in ("int8", "int4", "fp8")] == ["embedded and vllm", "vllm", "vllm"]


def test_a_configuration_knows_what_its_engines_can_do() -> None:
    assert Config().inference.kind is ENGINE_KINDS["embedded"]
    found = Config.model_validate({"model": {"dtype": "auto"}, "inference": {"engine": "vllm", "quantization": "int4"}}).inference.form
    assert found is not None and (found.name, found.formats) == ("int4", ("bfloat16",))
