"""A representative part of the table of changed settings; `resume.py` makes the whole one."""

import pytest

from faults.resume import ELSEWHERE, Bench, Case, cases
from faults.workshop import Workshop
from offbeat.config.resume import CHANGES

REPRESENTATIVE = {
    "`run.seed`", "`data.shuffle`", "`data.task`", "`train.optimizer.lr`", "`rollout.reward`",
    "`model.path`: another model of the same shape",
    "`model.path`: the same model in another folder", "`model.lora.rank`, of a run that trains the whole model",
    "data: a row more at the end", "data: reversed", "`data.path`: the same rows in another file", "the file of `rollout.reward`",
}


@pytest.fixture(scope="module")
def bench(shop: Workshop, tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Bench:
    """The runs that are resumed."""
    return Bench(shop, tmp_path_factory.mktemp("resume"), model_dir)


@pytest.mark.parametrize("case", [case for case in cases() if case.what in REPRESENTATIVE], ids=lambda case: case.what)
def test_a_changed_setting_is_told_or_refused_in_a_sentence(case: Case, bench: Bench) -> None:
    assert bench.row(case).problems == ()


def test_every_setting_is_changed_in_some_row() -> None:
    assert {case.what for case in cases()} >= REPRESENTATIVE
    changed = {key for case in cases() for key in case.settings} | set(ELSEWHERE) | {"run.total_steps"}
    left = {key for key in CHANGES if not key.startswith(("sft.", "preference.", "reward_model.", "serve.", "model.tiny."))} - changed
    assert left == {"run.warm_up"}, "a run with a checkpoint has its warm-up behind it"
