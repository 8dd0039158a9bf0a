"""What leaves the trainer: folders that any tool loads, whole or as an adapter, and that compute what the trainer does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from named_bytes import named_bytes
from offbeat.errors import StorageError
from offbeat.model.fingerprint import fingerprint
from offbeat.model.load import load_causal_lm
from offbeat.model.peft_io import read_adapter
from ranks import run_alone
from small_run import build_small_model
from train_samples import build_trainer, make_batch, train

LORA = {"rank": 3, "alpha": 6.0, "targets": ("q_proj", "up_proj"), "dropout": 0.1}
TOKENS = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with what an adapter's trainer gave out after two steps, and its canary."""
    folder = tmp_path_factory.mktemp("given")
    base = build_small_model(folder / "model", seed=1)

    def body(groups, _):
        trainer = build_trainer(groups, base, lora=LORA)
        train(trainer, [make_batch(2, 2, seed=seed) for seed in range(2)])
        snapshot = trainer.snapshot("float32")
        snapshot.write(folder / "published")
        assert snapshot.offer(folder / "offered", host="127.0.0.1", num_receivers=1, timeout_s=5) is None
        for dtype in ("float32", "bfloat16"):
            trainer.snapshot(dtype, merges=True).export(folder / dtype, tokenizer_folder=Path(base))
        with pytest.raises(StorageError, match="a version is written once"):
            snapshot.write(folder / "published")
        assert snapshot.num_bytes == 4 * sum(tensor.numel() for tensor in snapshot.adapter.named_tensors().values())
        return snapshot.fingerprint(), trainer.snapshot("bfloat16").fingerprint(), trainer.canary(TOKENS)

    return folder, *run_alone(body)


def logprobs_of(model):
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        return log_softmax(model(tokens).logits.float(), -1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


def test_an_adapter_is_published_in_the_format_of_peft_with_its_fingerprint(trained):
    folder, fingerprint, same, canary = trained
    assert fingerprint == same == read_adapter(folder / "published").fingerprint() == read_adapter(folder / "offered").fingerprint()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), folder / "published")
    assert logprobs_of(model) == pytest.approx(list(canary), abs=1e-5)
    assert model.peft_config["default"].lora_dropout == LORA["dropout"]
    assert model.peft_config["default"].base_model_name_or_path == str(folder / "model")


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.02)])
def test_an_export_is_the_merged_model_with_the_adapter_inside(trained, dtype, tolerance):
    folder, fingerprint, _, canary = trained
    model = AutoModelForCausalLM.from_pretrained(folder / dtype)
    assert str(model.dtype) == f"torch.{dtype}"
    assert logprobs_of(model) == pytest.approx(list(canary), abs=tolerance)
    assert read_adapter(folder / dtype / "adapter").fingerprint() == fingerprint
    assert (folder / dtype / "tokenizer.json").exists()


def test_a_whole_model_is_offered_under_the_fingerprint_it_is_published_with(tmp_path):
    base = build_small_model(tmp_path / "model", seed=1)

    def body(groups, _):
        trainer = build_trainer(groups, base)
        snapshot = trainer.snapshot("float32")
        snapshot.offer(tmp_path / "offered", host="127.0.0.1", num_receivers=1, timeout_s=5).close()
        snapshot.write(tmp_path / "published")
        assert snapshot.fingerprint() == fingerprint(named_bytes(load_causal_lm(str(tmp_path / "published"))))
        assert not (tmp_path / "offered").exists()
        with pytest.raises(StorageError, match="engines see no folder of rank 0's machine"):
            snapshot._write_fallback(None, snapshot.published())
        state = trainer.snapshot("bfloat16").state
        assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
        assert "lm_head.weight" not in state
        return True

    assert run_alone(body)


def test_scoring_with_an_adapter_drops_nothing(tmp_path):
    base = build_small_model(tmp_path / "model", seed=1)
    batch = make_batch(2, 2)

    def scores(groups, dropout):
        return build_trainer(groups, base, lora=LORA | {"dropout": dropout}).forward(batch).logprobs

    np.testing.assert_allclose(run_alone(scores, argument=0.5), run_alone(scores, argument=0.0), atol=1e-6)
