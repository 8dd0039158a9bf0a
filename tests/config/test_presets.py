"""The table of presets: every row is a whole configuration that is valid, and is explained."""

import re
from pathlib import Path

import pytest

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.dump import dump_toml
from offbeat.config.load import load_config
from offbeat.config.presets import PRESETS

NEEDED = {"opd": (("teacher.path", "somebody/larger"),)}
"""What a preset needs besides its row."""

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_with_what_it_needs_is_a_valid_configuration_that_survives_its_file(preset, tmp_path):
    config = load_config(None, [("algorithm.preset", preset), *NEEDED.get(preset, ())])
    (tmp_path / "run.toml").write_text(dump_toml(config))
    assert load_config(str(tmp_path / "run.toml")) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_differs_from_the_default_in_every_setting_that_it_names(preset):
    default = AlgorithmConfig().model_dump()
    assert all(default[name] != value for name, value in PRESETS[preset].settings.items())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_a_source_and_a_sentence_that_says_when_to_use_it(preset):
    row = PRESETS[preset]
    assert re.fullmatch(r"\d{4}\.\d{5}|[A-Za-z-]+", row.source) and row.use.endswith(".")


def test_the_page_explains_every_preset_once_with_its_source_and_settings():
    _, _, page = PAGE.partition("## Preference pairs")[0].partition("The formulas and settings:")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows] == list(PRESETS)
    for name, _, settings, source, use in rows:
        row = PRESETS[name]
        assert row.source in source and use == row.use
        assert re.findall(r"`(\w+) = ", settings) == list(row.settings)


def test_the_page_says_of_every_preset_what_its_ratio_compares_and_where_it_differs():
    page = PAGE.partition("## The presets\n")[2].partition("The formulas and settings:")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [name for name, *_ in rows] == [f"`{name}`" for name in PRESETS]
    for name, source, _, anchor, _, _, aggregation, _, differs in rows:
        row, config = PRESETS[name.strip("`")], AlgorithmConfig(preset=name.strip("`"))
        assert row.source in source and differs == (row.differs or "as published") and aggregation == f"`{config.loss_aggregation}`"
        assert anchor == ("-" if config.objective == "cross_entropy" else {"prox": "prox", "rollout": "beh"}[config.anchor])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_ratio_compares_with_the_policy_that_sampled_unless_a_weight_or_filter_does_or_the_source_has_no_ratio(preset):
    config = AlgorithmConfig(preset=preset)
    assert config.anchor == "rollout" or config.weight != "none" or config.filters or config.objective == "cross_entropy"
