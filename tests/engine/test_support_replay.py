"""Supports that the embedded engine returns: with them the trainer computes the distributions that it sampled from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from offbeat.algorithms.experience import make_batch as batch_of
from offbeat.chat.shaping import Shaping, Structure
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.train import TrainConfig
from offbeat.data.packing import PackedRow, pack_row
from offbeat.data.sample_supports import BITS, KEPT, LEFT_OUT, join_supports
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request, SamplingParams
from offbeat.engine.sampler import find_supports
from offbeat.errors import RefusedError
from offbeat.inference.sampling import Sample
from offbeat.journal.records import pack, unpack
from offbeat.model.logprobs import token_logprobs
from offbeat.rollout.builder import TrajectoryBuilder
from offbeat.trainer.policy import load_policy
from row_samples import sampled_batch

PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 30], [17, 6, 5, 33]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=3, temperature=0.7, supports=True)
CUT = replace(PARAMS, top_p=0.9, top_k=20, shaping=Shaping(min_p=0.05))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders: dict[int, str] = {}

    def folder(vocab_size: int = 0) -> str:
        """A random model; its vocabulary is larger than its tokenizer's if a size is given."""
        if vocab_size not in folders:
            path, tokenizer = tmp_path_factory.mktemp("model"), character_tokenizer()
            tokenizer.save(path)
            config = Qwen3Config(
                vocab_size=vocab_size or tokenizer.vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, intermediate_size=48, max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None, pad_token_id=0)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = Qwen3ForCausalLM(config)
                for name, parameter in model.named_parameters():
                    parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.25)
            model.save_pretrained(path)
            folders[vocab_size] = str(path)
        return folders[vocab_size]

    return folder


@pytest.fixture(scope="module")
def engine(folder_of):
    return load_engine(EngineOptions(model=folder_of()))


def row_of(outputs: list[list[Output]], *, replayed: bool = True, share_prefix: bool = True) -> PackedRow:
    """The row of samples of `PROMPTS`, with the supports that the engine gave."""
    batch, samples = sampled_batch(PROMPTS, outputs), [output for own in outputs for output in own]
    supports = join_supports([output.supports for output in samples], [len(output.token_ids) for output in samples])
    return pack_row(replace(batch, supports=supports if replayed else None), share_prefix=share_prefix)


def gaps(folder: str, row: PackedRow, outputs: list[list[Output]], *, temperature: float) -> np.ndarray:
    """[M] log-probabilities of the trainer less the engine's."""
    wanted = np.concatenate([output.logprobs for own in outputs for output in own])
    found = np.empty(len(wanted))
    found[row.batch_index] = token_logprobs(load_policy(folder, config=TrainConfig()), row, temperature=temperature).detach().numpy()
    return found - wanted


@pytest.mark.parametrize("params", [
    replace(PARAMS, top_p=0.9), replace(PARAMS, top_k=20), replace(PARAMS, top_k=1), replace(PARAMS, shaping=Shaping(min_p=0.05)), CUT,
    replace(PARAMS, temperature=1.3, top_p=0.9), replace(PARAMS, shaping=Shaping(allowed_token_ids=(3, 5, 8, 20))),
    replace(PARAMS, shaping=Shaping(bad_words=("1", "ab"), min_tokens=4)),
    replace(PARAMS, ignore_eos=False, top_k=5, shaping=Shaping(structure=Structure("regex", "[0-9]{4,30}"))),
], ids=lambda params: f"p{params.top_p} k{params.top_k} {','.join(params.shaping.acting)}")
def test_trainer_and_engine_agree_to_1e5_within_supports_and_the_trainer_is_too_low_without(engine, folder_of, params):
    outputs = engine.generate(PROMPTS, params, n=2)
    folder = folder_of()
    for share_prefix in (True, False):
        row = row_of(outputs, share_prefix=share_prefix)
        assert row.supports is not None and row.supports.hold(row.target).all()
        assert np.abs(gaps(folder, row, outputs, temperature=params.temperature)).max() < 1e-5
    # Over all tokens, each token loses the logarithm of the mass that was kept: every ratio is too small.
    without = gaps(folder, row_of(outputs, replayed=False), outputs, temperature=params.temperature)
    assert without.max() < 1e-5 and without.mean() < -1e-3


@pytest.mark.parametrize(("params", "form"), [
    (replace(PARAMS, top_p=0.9, temperature=3.0), BITS), (replace(PARAMS, top_k=20), KEPT), (replace(PARAMS, top_p=0.999999), LEFT_OUT)])
def test_a_large_vocabulary_has_each_support_in_its_shortest_form(folder_of, params, form):
    engine = load_engine(EngineOptions(model=folder_of(5000)))
    outputs = engine.generate(PROMPTS, params, n=2)
    supports = outputs[0][0].supports
    assert form in supports.forms and supports.sizes.max() <= 157
    row = row_of(outputs)
    assert np.abs(gaps(folder_of(5000), row, outputs, temperature=params.temperature)).max() < 1e-5


def test_the_tokens_found_are_those_whose_logits_are_finite():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 100, generator=generator)
    for row, share in enumerate((0.0, 0.005, 0.02, 0.03, 0.2, 0.5, 0.97, 0.99, 1.0)):
        logits[row, torch.rand(100, generator=generator) >= share] = -torch.inf
    logits[0, 3] = logits[1, 4] = 0.0
    supports = find_supports(logits)
    found = np.stack([supports.hold(np.full(9, token)) for token in range(100)], axis=1)
    assert np.array_equal(found, logits.isfinite().numpy()) and supports.sizes.max() <= 4 and supports.are_whole.tolist()[-1]
    assert set(supports.forms.tolist()) == {LEFT_OUT, KEPT, BITS}


def test_samples_of_a_batch_have_each_their_own_supports_and_plain_ones_none(engine):
    together = [CUT, replace(CUT, supports=False), replace(PARAMS, seed=9), replace(CUT, top_k=3, max_new_tokens=7)]
    for number, params in enumerate(together):
        engine.submit(Request(id=str(number), prompt=PROMPTS[0], params=params, n=2))
    found: dict[str, list[Output]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.request_id, []).append(event.result)
    for number, params in enumerate(together):
        [alone] = engine.generate([PROMPTS[0]], params, n=2)
        for one, other in zip(sorted(found[str(number)], key=lambda output: output.index), alone, strict=True):
            assert one.token_ids == other.token_ids and (one.supports is None) == (other.supports is None) == (number in (1, 2))
            if one.supports is not None and other.supports is not None:
                assert np.array_equal(one.supports.words, other.supports.words) and len(one.supports) == len(one.token_ids)
    few = found["3"][0].supports
    assert sum(few.hold(np.full(7, token)).astype(int) for token in range(60)).max() == 3


def test_an_interrupted_sample_keeps_the_supports_of_each_version(folder_of):
    engine: EmbeddedEngine = load_engine(EngineOptions(model=folder_of()))
    engine.submit(Request(id="a", prompt=PROMPTS[0], params=CUT))
    for _ in range(5):
        engine.step()
    state = {name: tensor.flip(0) if name == "lm_head.weight" else tensor.clone() for name, tensor in engine._forward.tensors().items()}
    engine.stage(1, ("changed", ""), engine._forward.prepare(state))  # pyright: ignore
    engine.switch(1, "recompute")
    events = []
    while engine.has_work:
        events += engine.step()
    [output] = [event.result for event in events]
    assert output.versions == [0] * 5 + [1] * 7 and output.supports.hold(np.array(output.token_ids)).all()
    row = row_of([[output]])
    gap = np.abs(gaps(folder_of(), row, [[output]], temperature=0.7))
    assert gap[:5].max() < 1e-5 and gap[5:].max() > 0.1, "the trainer has the first version"
    [[first]] = engine.generate([PROMPTS[0]], CUT)
    assert not np.array_equal(first.supports.at_indices(np.arange(5)).words, output.supports.at_indices(np.arange(5)).words)


def test_supports_of_several_turns_come_through_the_journal_into_a_batch(engine, folder_of):
    groups = []
    for turn_params in (CUT, replace(CUT, seed=4)):
        built = TrajectoryBuilder(PROMPTS[0])
        for hint in ((9, 3), ()):
            [[output]] = engine.generate([list(built.tokens)], turn_params)
            built.generated(_sample(output)).given(hint)
        groups.append(built.finish(float(len(groups))))
    plain = TrajectoryBuilder(PROMPTS[1]).generated(replace(_sample(output), supports=None)).finish(1.0)
    assert plain.supports is None and len(groups[0].supports) == len(groups[0])
    back = unpack(pack(Group("0:1", 0, tuple(groups))))
    batch = batch_of([back], config=AlgorithmConfig(), max_new_tokens=12)
    assert batch.supports is not None and len(batch.supports) == batch.num_targets == 48
    row = pack_row(batch, share_prefix=True)
    found = token_logprobs(load_policy(folder_of(), config=TrainConfig()), row, temperature=0.7).detach().numpy()
    assert np.abs(found - batch.columns["rollout_logprobs"][row.batch_index]).max() < 1e-5


def _sample(output: Output) -> Sample:
    return Sample(output.token_ids, output.logprobs, output.versions, "", "length", supports=output.supports)


def test_a_support_that_lacks_its_token_costs_the_sample(engine):
    [[output]] = engine.generate([PROMPTS[0]], replace(CUT, top_k=1))
    wrong = replace(_sample(output), tokens=np.array(output.token_ids) + 1)
    assert "Trajectory.supports must have each token among those" in TrajectoryBuilder(PROMPTS[0]).generated(wrong).finish(1.0).reason


def test_supports_in_parts_or_beside_log_probabilities_of_all_tokens_are_refused():
    with pytest.raises(RefusedError, match="return_supports must be false with scaled_logprobs"):
        replace(CUT, scaled_logprobs=True)
    with pytest.raises(RefusedError, match="return_supports must be false with stream"):
        Request(id="a", prompt=[1], params=CUT, stream=True)
    with pytest.raises(RefusedError, match="return_supports must be false with begun_tokens"):
        Request(id="a", prompt=[1, 2], params=replace(PARAMS, top_p=0.9), num_begun=1)
