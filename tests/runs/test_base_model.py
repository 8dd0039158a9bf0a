"""An adapter's run on random weights warms up a whole model first; one on a given model does not."""

from pathlib import Path

import pytest

from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.config.root import Config
from offbeat.runs.base_model import base_config, needs_base, on_base
from small_run import small_config


def config_of(root: Path, **changes: str) -> Config:
    return small_config(root, **{"run__warm_up": "true", "model__lora__rank": "4", **changes})


def test_only_an_adapter_on_random_weights_needs_a_base(tmp_path: Path) -> None:
    assert needs_base(config_of(tmp_path))
    for changes in ({"model__lora__rank": "0"}, {"run__warm_up": "false"}, {"model__path": "some/model"}):
        assert not needs_base(config_of(tmp_path, **changes))


def test_the_base_is_a_whole_model_of_a_run_beside_this_one(tmp_path: Path) -> None:
    base = base_config(config_of(tmp_path, model__quantization="int8"))
    assert (base.run.name, base.model.lora.rank, base.model.quantization, base.run.dir) == ("small-base", 0, "none", str(tmp_path))


def test_the_base_is_made_once_and_kept_when_the_run_goes_on(tmp_path: Path) -> None:
    config, made = config_of(tmp_path), []

    def make(base: Config) -> None:
        made.append(base.run.name)
        (base.run_dir / "export").mkdir(parents=True, exist_ok=True)
        (base.run_dir / "export" / "config.json").write_text("{}")

    on = on_base(config, make, fresh=False)
    assert (on.model.path, on.run.warm_up, on.model.lora.rank) == (str(tmp_path / "small-base" / "export"), False, 4)
    on_base(config, make, fresh=False)
    checkpoints = CheckpointIndex(config.run_dir / "checkpoints")
    checkpoints.folder(1).mkdir(parents=True)
    checkpoints.complete(1, b"{}")
    assert on_base(config, make, fresh=False) == on
    assert made == ["small-base"] * 2
    on_base(config, make, fresh=True)
    assert made == ["small-base"] * 3


def test_spmd_mode_says_how_to_make_a_base(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"run.warm_up must be false with model.lora.rank > 0.*offbeat sft"):
        config_of(tmp_path, run__mode="spmd")
