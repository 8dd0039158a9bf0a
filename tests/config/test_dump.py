"""Configurations and values as TOML."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.dump import dump_toml, toml_value
from offbeat.config.load import load_config


def test_dumped_toml_loads_to_an_equal_configuration(tmp_path):
    config = load_config(
        None,
        [("run.name", "x"), ("rollout.stop", '["\\n", "é\\"\\\\"]'), ("train.optimizer.lr", "1e-7"),
         ("algorithm.constants", "{tau = 2.0, kind = 'tv'}"),
         ("algorithm.filters", '[{metric = "k1", low = -0.5, high = 0.5}, {metric = "opsm", level = "sequence"}]'),
         ("data.system_prompt", "Hi 😀\x7f\t")],
    )
    path = tmp_path / "dumped.toml"
    text = dump_toml(config)
    path.write_text(text)
    assert load_config(str(path)) == config
    assert {"run", "model", "sft"} <= tomllib.loads(text).keys()
    assert "tiny" in tomllib.loads(text)["model"]


@given(st.recursive(st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_value_survives_toml(value):
    assert repr(tomllib.loads(f"v = {toml_value(value)}")["v"]) == repr(value)
