"""Parts of `check.py --rehearse` that stand for a GPU: interfaces, packages, and fake CUDA tensors, which have no numbers.

Private interfaces of torch and others are looked up. Then forward passes of every family, losses of every preset and of preferences,
adapters and the embedded engine run on fake tensors of cuda:0 (`tests/fake_cuda.py`): one on a wrong device fails the part, and so does a
micro-batch that waits for the device, with its place.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from offbeat.algorithms.objectives import policy_loss, preference_loss
from offbeat.algorithms.preference import pair_batch
from offbeat.chat.shaping import Shaping
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.preference import PAIR_LOSSES, PreferenceConfig
from offbeat.config.presets import PRESETS
from offbeat.data.batch import Batch, LossSpec, SharedPrompts
from offbeat.data.pairs import EncodedPair
from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.forward import Forward
from offbeat.engine.forward_direct import DirectForward
from offbeat.engine.forward_hf import HFForward
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Request, SamplingParams, ScoreJob
from offbeat.errors import ModelError
from offbeat.losses.compose import target_losses
from offbeat.model.attention import PACKED
from offbeat.model.lora import AdapterBank
from offbeat.model.peft_io import Adapter
from offbeat.trainer.policy import predict_logprobs, row_of, score_row

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "tools")]
_FAMILIES = import_module("family_table")
_FAKE = import_module("fake_cuda")

_ENGINE_WAITS = ("engine/sampler.py", "engine/scoring.py")
"""Files in which a step may wait: for its tokens, and for scores."""

_OUTSIDE = "wait within transformers"
_QWEN3 = next(family for family in _FAMILIES.FAMILIES if family.name == "Qwen3")


def rehearsal(needed: Callable[[], Sequence[str]]) -> dict[str, Callable[[], Any]]:
    """Return the parts by name; `needed` gives the requirements that are not installed, such as "zstandard>=0.23"."""
    return {
        "interfaces": interfaces, "packages": lambda: packages(needed()), "fake families": families, "fake losses": losses,
        "fake adapters": adapters, "fake engine": engine}


def interfaces() -> dict[str, int]:
    """Count what is used of torch and others that they may change; all of it must be there and take its arguments."""
    schemas, private = import_module("operator_schemas"), import_module("private_interfaces")
    uses, _ = schemas.check(schemas.SOURCE, list(schemas.PACKAGES))
    faults = [f"{use.place} {use.name}: {fault}" for use, fault in uses if fault]
    faults += [f"{each.file} {each.name}: {text}" for each in private.INTERFACES for text in private.differences(each)]
    _refuse(faults)
    return {"uses of names": len(uses), "private attributes": len(private.INTERFACES)}


def packages(missing: Sequence[str]) -> dict[str, str]:
    """Report that nothing is missing that an environment of training needs."""
    _refuse([f"{requirement} is not installed" for requirement in missing])
    return {"missing": "none"}


def families() -> dict[str, Any]:
    """Run a forward pass of each family as a micro-batch of training does, and count those whose sequences run one by one."""
    found: dict[str, list[str]] = {"packed": [], "apart": [], _OUTSIDE: []}
    faults: list[str] = []
    for family in _FAMILIES.FAMILIES:
        how, waits = "packed", list[str]()
        try:
            waits = _micro_batch(family, PACKED)
        except (ModelError, ValueError, KeyError):  # transformers raises the others where no one may replace a model's attention
            how = "apart"
            waits = _micro_batch(family, None)
        except Exception as exc:
            faults.append(f"{family.name}: {type(exc).__name__}: {str(exc)[:300]}")
        found[how].append(family.name)
        own = [wait for wait in waits if not wait.startswith("transformers")]
        faults += [f"{family.name}: {wait}" for wait in own]
        found[_OUTSIDE] += [family.name] * (len(own) < len(waits))
    _refuse(faults)
    return {"packed": len(found["packed"]), "apart": len(found["apart"]), _OUTSIDE: ", ".join(found[_OUTSIDE])}


def losses() -> dict[str, int]:
    """Compute the losses and metrics of every preset and of every loss of preference pairs."""
    faults = [fault for name in PRESETS for fault in _loss(name, policy_loss(AlgorithmConfig(preset=name)))]
    faults += [fault for name in PAIR_LOSSES for fault in _loss(name, preference_loss(PreferenceConfig(loss=name)))]
    _refuse(faults)
    return {"presets": len(PRESETS), "of pairs": len(PAIR_LOSSES)}


def adapters() -> dict[str, int]:
    """Run a micro-batch of two adapters at once."""
    batch = _policy_batch(policy_loss(AlgorithmConfig()))
    row = row_of(batch, np.arange(len(batch)), share_prefix=True)
    with _model(_QWEN3, PACKED) as (model, waits):
        bank = AdapterBank(model, rank=4)
        slots = [bank.add(rank=4, scaling=2.0, seed=seed) for seed in range(2)]
        routes = bank.route_all(slots[0]), bank.route(row, np.repeat(slots, 3))
        waits.found.clear()
        for route in routes:
            with bank.using(route):
                _checked(score_row(model, batch, row, predict=predict_logprobs, temperature=0.7, report=True).losses)
    _refuse(waits.found)
    return {"adapters": len(slots)}


def engine() -> dict[str, Any]:
    """Serve samples of all kinds, adapters and scores on both forward paths; count steps, and waits by file."""
    found: dict[str, Any] = {}
    for path in ("direct", "hf"):
        found[f"{path} steps"], waits = _serve(path)
        _refuse([wait for wait in waits if not wait.startswith(_ENGINE_WAITS)])
        counts = Counter(wait.partition(":")[0] for wait in waits)
        if counts["engine/sampler.py"] != found[f"{path} steps"]:
            raise RuntimeError(f"{found[f'{path} steps']} steps read their tokens in {counts['engine/sampler.py']} transfers")
        found[f"{path} waits"] = ", ".join(f"{file} {count}" for file, count in sorted(counts.items()))
    return found


def _micro_batch(family: Any, attention: str | None) -> list[str]:
    batch = _policy_batch(policy_loss(AlgorithmConfig(preset="gspo")))
    row = row_of(batch, np.array([4, 0, 3]), share_prefix=attention is not None)
    with _model(family, attention) as (model, waits):
        _checked(score_row(model, batch, row, predict=predict_logprobs, temperature=0.7, report=True).losses)
    return waits.found


@contextmanager
def _model(family: Any, attention: str | None) -> Iterator[tuple[PreTrainedModel, Any]]:
    """Give a family's tiny model in bfloat16 on the fake device, and the waits for that."""
    settings = {**_FAMILIES.SIZES, **family.settings}
    if "moe_intermediate_size" in settings:
        settings["moe_intermediate_size"] = 16  # the kernel of all experts wants rows of a multiple of 16 bytes
    kept: dict[str, Any] = {
        name: value for name, value in settings.items() if value is not None or name in ("bos_token_id", "sliding_window")}
    config = CONFIG_MAPPING[family.model_type](**kept)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    with _FAKE.fake_cuda() as waits:
        model.to_empty(device=_FAKE.CUDA).tie_weights()
        yield model, waits


def _policy_batch(loss: LossSpec) -> Batch:
    """Return six samples of three prompts, with every column that a loss over samples may read."""
    prompts, lengths = np.repeat([2, 3, 4], 2), np.array([5, 3, 6, 2, 4, 7])
    total = prompts + lengths
    trained = np.concatenate([np.arange(whole) >= prompt for whole, prompt in zip(total, prompts, strict=True)])
    names = (
        "rollout_logprobs", "prox_logprobs", "ref_logprobs", "advantages", "loss_weights", "m2_mask", "imitate_mask", "detach_mask",
        "kl_cov_mask", "returns", "values", "teacher_logprobs", "teacher_least")
    return Batch.of_next_tokens(
        np.arange(total.sum(), dtype=np.int32) % 60 + 2, trained, lengths=total,
        columns={name: np.full(len(trained), -1.0 if name.endswith(("logprobs", "least")) else 1.0) for name in names}, losses=(loss,),
        shared=SharedPrompts(np.arange(6) // 2, prompts))


def _pair_batch(loss: LossSpec) -> Batch:
    def answer(length: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(2 + length, dtype=np.int32), np.arange(2 + length) >= 2

    batch = pair_batch([EncodedPair((answer(3), answer(5)), (True, False), 0.0, 2) for _ in range(3)], loss)
    return batch.with_columns(ref_logprobs=np.full(batch.num_targets, -1.0))


def _loss(name: str, loss: LossSpec) -> list[str]:
    batch = _pair_batch(loss) if name in PAIR_LOSSES else _policy_batch(loss)
    with _FAKE.fake_cuda() as waits:
        logprobs, entropy = (torch.zeros(batch.num_targets, device=_FAKE.CUDA) for _ in range(2))
        found = target_losses(logprobs, batch, np.arange(batch.num_targets), entropy=entropy, report=True)
        report = found.report
        _checked(found.losses, *report.means.values(), *report.minima.values(), *report.maxima.values(), *(
            tensor for pair in report.groups.values() for tensor in pair))
    return [f"{name}: {wait}" for wait in waits.found]


def _serve(path: str) -> tuple[int, list[str]]:
    """Return the number of steps that draw tokens, and what waited."""
    options = EngineOptions(model="", max_running=8, max_cache_bytes=1 << 20, dtype="bfloat16")
    with torch.inference_mode(), _model(_QWEN3, "sdpa") as (model, waits):
        place = {"dtype": torch.bfloat16, "device": _FAKE.CUDA}
        direct = partial(DirectForward, model.config, dict(model.named_parameters()))
        forward: Forward = HFForward(model, **place) if path == "hf" else direct(**place)
        serving = EmbeddedEngine(forward, character_tokenizer(), options)
        pair = torch.zeros(2, 32, device="cpu"), torch.zeros(32, 2, device="cpu")
        serving.adapters.add("adapter", "adapter", Adapter(2, 1.0, {"model.layers.0.self_attn.q_proj": pair}))
        waits.found.clear()
        kinds = [
            {"temperature": 0.0}, {"top_p": 0.6}, {"top_k": 5, "scaled_logprobs": True}, {"top_logprobs": 3, "temperature": 0.7},
            {"shaping": Shaping(min_p=0.1, presence_penalty=0.5, repetition_penalty=1.3)},
            {"shaping": Shaping(logit_bias=((5, 2.0),), min_tokens=2)}, {"shaping": Shaping(allowed_token_ids=(3, 8, 9))}]
        for number, kind in enumerate(kinds):
            params = SamplingParams(max_new_tokens=4 + number, seed=number, ignore_eos=True, **kind)
            serving.submit(Request(
                id=str(number), prompt=list(range(3, 9 + number)), params=params, n=1 + number % 2, adapter="adapter" * (number % 2)))
        steps = 0
        while serving.has_work:
            serving.step()
            steps += 1
        serving.submit(ScoreJob(id="scores", tokens=list(range(3, 20)), top_k=2))
        serving.step()
    return steps, waits.found


def _checked(*tensors: Tensor) -> None:
    """Refuse results that are not on the device."""
    elsewhere = {str(tensor.device) for tensor in tensors} - {str(_FAKE.CUDA)}
    _refuse([f"a result is on {device}" for device in sorted(elsewhere)])


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        more = f" and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise RuntimeError("; ".join(faults[:20]) + more)
