"""Scalars of several ranks become one."""

import math

from offbeat.dist.collectives import max_scalars, sum_scalars
from ranks import run_alone, run_ranks


def _reduce(groups, _argument):
    values = {"b": 1.0 + groups.rank, "a": 0.1 * 3**groups.rank, "c": -1.0 if groups.rank else -2.0}
    if groups.rank == 1:
        values = dict(reversed(values.items()))
    undefined = sum_scalars({"x": math.nan if groups.rank else 1.0}, groups.cpu_group)["x"]
    return [sum_scalars(values, groups.cpu_group), max_scalars(values, groups.cpu_group), math.isnan(undefined)]


def test_two_ranks_get_the_same_sums_and_maxima_whatever_the_order_of_keys():
    first, second = run_ranks(_reduce, world=2)
    assert first == second
    assert first[0] == {"a": 0.1 + 0.1 * 3, "b": 3.0, "c": -3.0}
    assert first[1] == {"a": 0.1 * 3, "b": 2.0, "c": -1.0}


def test_what_is_not_a_number_on_one_rank_is_so_on_all():
    assert [result[2] for result in run_ranks(_reduce, world=2)] == [True, True]


def test_one_rank_keeps_its_values():
    assert run_alone(_reduce)[0] == {"a": 0.1, "b": 1.0, "c": -2.0}
