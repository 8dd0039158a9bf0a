"""Filters and regularisers are those that a batch's loss can carry, and read columns that exist."""

from typing import get_args, get_type_hints

from offbeat.config.loss_terms import FILTERS, OWN_FILTERS, REGULARISERS
from offbeat.data.batch import FilterSpec, RegulariserSpec


def test_the_tables_have_the_names_that_a_loss_can_carry() -> None:
    assert get_args(get_type_hints(FilterSpec)["metric"]) == tuple(FILTERS)
    assert get_args(get_type_hints(RegulariserSpec)["kind"]) == tuple(REGULARISERS)


def test_a_run_names_all_filters_but_the_one_that_a_setting_of_its_own_chooses() -> None:
    assert set(FILTERS) - set(OWN_FILTERS) == {"clip_cov"}
