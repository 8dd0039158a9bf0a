"""Rules ask for what a kind of engine can do."""

from offbeat.config.engine_kinds import ENGINE_KINDS, kinds_that
from offbeat.config.root import Config


def test_the_kinds_with_an_ability_are_named_in_the_order_of_the_table() -> None:
    assert (kinds_that("sleeps"), kinds_that("splits"), kinds_that("inside")) == ("embedded and vllm", "vllm and sglang", "embedded")


def test_a_configuration_knows_what_its_engines_can_do() -> None:
    assert Config().inference.kind is ENGINE_KINDS["embedded"]
