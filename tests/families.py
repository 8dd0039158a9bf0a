"""What works with which family of models: tries every row of `family_table.py` and makes the table of docs/models.md.

`python tests/families.py` compares the file with what the code does now, `--write` writes it. A cell is "yes" when the numbers equal
those of transformers' own eager forward of each sequence alone, or the one sentence with which it is refused. Anything else raises.
"""

import copy
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

import image_world
from family_table import FAMILIES, SIZES, Family
from offbeat.config.model import ModelConfig
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.packing import pack_row
from offbeat.engine.cache import SlotCache
from offbeat.engine.forward import Forward, bytes_of, fingerprint_tensors
from offbeat.engine.loader import load_forward
from offbeat.engine.lora import AdapterRows, AdapterStack
from offbeat.engine.options import EngineOptions
from offbeat.engine.versions import read_version
from offbeat.errors import ModelError
from offbeat.model.fingerprint import fingerprint
from offbeat.model.fused_experts import split_name
from offbeat.model.hf_io import read_safetensors
from offbeat.model.images import IMAGE_FAMILIES
from offbeat.model.logprobs import packs_rows, token_logprobs
from offbeat.model.lora import AdapterBank
from offbeat.model.lora_targets import ALL_LINEAR, EXPERTS
from offbeat.model.peft_io import Adapter
from offbeat.trainer.policy import let_replay, load_policy
from offbeat.trainer.snapshots import ModelSnapshot
from offbeat.trainer.state import full_state
from offbeat.weights.proof import BY_WEIGHTS, ProofJudge, Verdict
from offbeat.weights.protocol import Manifest, Proof

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 30], [17, 6, 5, 33]]
SAMPLES = [(0, [8, 19, 2, 60, 11, 45, 13]), (0, [21, 7, 9]), (1, [5, 30, 44, 6, 12])]
"""(prompt, answer) pairs; two answers share a prompt."""

SEQUENCES = [PROMPTS[prompt] + answer for prompt, answer in SAMPLES]
TOLERANCE = 2e-4
YES, NONE = "yes", "–"
COLUMNS = {
    "packed": (
        "Trainer, packed", "Several sequences in one row, with shared prompts and without (the default). Log-probabilities are those of"
        " each sequence alone, sliding windows shorter than a sequence included."),
    "unpacked": (
        "Trainer, apart", "With `train.share_prefix = false`, where a model that cannot pack runs each sequence by itself, padded beside"
        ' others of like length. Such a model trains with `shard` and `cp` of 1 in `[train.parallel]`, and one adapter at a time.'),
    "fast": ("Embedded, fast", "The embedded engine's own forward. It is chosen by itself where it says yes."),
    "hf": (
        "Embedded, general", "The embedded engine over transformers' modules, chosen elsewhere. Where it says no, use vLLM or SGLang."),
    "names": (
        "Published names", "What is published has the names of the family's own checkpoints (each expert by itself, for one), which vLLM"
        " and SGLang load. The fingerprint is taken under these names, and is equal on the embedded engine."),
    "proof": (
        "Proven by weights", "The embedded engine proves a version by the fingerprint of the tensors that it computes with, experts and"
        " routers included ([proof](weights.md#proof)). That of the right weights is conclusive, and with one number changed in any of the"
        " tensors that training can change it is refused. A dash is a model that it does not serve."),
    "lora": (
        "LoRA", "An adapter over all linear layers, in the trainer and in the embedded engine where that serves the model. Experts that"
        " transformers fuses into one tensor are not linear layers and stay as they are."),
    "expert_lora": (
        "LoRA of experts", "The same with such experts, `model.lora.targets = [\"all-linear\", \"experts\"]` ([experts](lora.md#experts))."
        " A dash is a model without experts."),
    "routes": (
        "Experts replayed", "With `model.route_replay = \"rollout\"`, the trainer's packed rows use the experts that the embedded engine"
        " used ([routers](algorithms.md#replayed-experts)). A dash is a model without experts."),
}


@dataclass(frozen=True)
class Trial:
    """A family's tiny model in a folder, and what is true of it."""

    family: Family
    folder: str
    engines: dict[str, Forward | ModelError] = field(default_factory=dict)

    @cached_property
    def reference(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.folder, attn_implementation="eager").eval()

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        return alone(self.reference)

    @cached_property
    def policy(self) -> PreTrainedModel:
        """As it trains without shared prompts."""
        return load_policy(self.folder, config=TrainConfig(share_prefix=False))

    def engine(self, path: str) -> Forward:
        """The embedded engine's forward on a path, loaded once; or the refusal."""
        if path not in self.engines:
            try:
                self.engines[path] = load_forward(EngineOptions(model=self.folder, forward=path))
            except ModelError as exc:
                self.engines[path] = exc
        if isinstance(found := self.engines[path], ModelError):
            raise found
        return found

    def served(self) -> list[Forward]:
        """On every path that serves it."""
        for path in ("direct", "hf"):
            with suppress(ModelError):
                self.engine(path)
        return [found for found in self.engines.values() if not isinstance(found, ModelError)]


def build(family: Family, folder: str) -> Trial:
    """Write a family's tiny model with strong weights."""
    settings = {**SIZES, **family.settings}
    kept = {name: value for name, value in settings.items() if value is not None or name in ("bos_token_id", "sliding_window")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family.model_type](**kept))
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or "ln_" in name
            parameter.data.normal_(1.0 if is_norm and name.endswith("weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return Trial(family, folder)


def try_all(family: Family) -> dict[str, str]:
    """Each column's cell; see the module.

    Raises:
        AssertionError: numbers are wrong though nothing was refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        trial = build(family, folder)
        return {column: _cell(trial, check) for column, check in CHECKS.items()}


def _cell(trial: Trial, check: Callable[[Trial], None]) -> str:
    if check in (check_routes, check_expert_lora) and not any("expert" in name for name in trial.family.settings):
        return NONE
    if check is check_proof and not trial.served():
        return NONE
    try:
        check(trial)
    except ModelError as exc:
        assert "\n" not in str(exc)
        return str(exc).replace(trial.folder, "it")
    return YES


# -- the columns -------------------------------------------------------------------------------------------------------------------------


def check_packed(trial: Trial) -> None:
    """Rows of several sequences, with shared prompts and without."""
    policy = load_policy(trial.folder, config=TrainConfig())
    assert packs_rows(policy)
    for share_prefix in (True, False):
        _compare(_trained(policy, share_prefix=share_prefix), _answers(trial.expected))


def check_unpacked(trial: Trial) -> None:
    """Each sequence by itself: in a row of its own, or as models run that do not pack."""
    policy = trial.policy
    if not packs_rows(policy):
        _compare(_trained(policy, share_prefix=False), _answers(trial.expected))
    for i, expected in enumerate(_answers(trial.expected)):
        _compare([token_logprobs(policy, pack_row(_batch([i]), share_prefix=False))], [expected])


def check_fast(trial: Trial) -> None:
    """The embedded engine's own forward."""
    _check_engine(trial, trial.engine("direct"))


def check_hf(trial: Trial) -> None:
    """The embedded engine over transformers' modules."""
    _check_engine(trial, trial.engine("hf"))


def check_names(trial: Trial) -> None:
    """What is published has the names of the family's checkpoints, loads as it was, and has one fingerprint wherever it serves."""
    policy = copy.deepcopy(trial.policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    snapshot = ModelSnapshot(policy, Path(trial.folder), full_state(policy, dtype="float32", keep=True), "float32")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "v1"
        snapshot.write(folder)
        tensors = dict(read_safetensors(folder))
        assert tensors.keys() == dict(read_safetensors(trial.folder)).keys() >= set(trial.family.names), sorted(tensors)
        loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        expected = _answers(alone(loaded))
        _compare(_trained(policy, share_prefix=False), expected)
        for forward in trial.served():
            before = forward.tensors()
            forward.install(read_version(forward, str(folder)))
            assert fingerprint_tensors(forward.tensors()) == snapshot.fingerprint()
            _compare(_answers(_scored(forward)), expected)
            forward.install(forward.prepare(before))


def check_proof(trial: Trial) -> None:
    """The right weights are proven by their fingerprint, and those with one number changed in one tensor are refused."""
    state, constants = dict(read_safetensors(trial.folder)), {name for name, _ in trial.policy.named_buffers()}
    for forward in trial.served():
        before, names = forward.installed(), forward.tensors().keys()
        assert state.keys() - names <= constants, state.keys() - names
        published = fingerprint(bytes_of((name, state[name]) for name in names))

        def judge(given: dict[str, torch.Tensor], forward: Forward = forward, published: str = published) -> Verdict:
            forward.install(forward.prepare(given))
            proof = Proof(1, forward.fingerprinter()(), (-1.0,))
            return ProofJudge.of(0.0, "float32").judge("engine 0", Manifest(1, "", published, (5, 9), (-1.0,)), proof)

        assert judge(state).means == BY_WEIGHTS
        for name in names:
            changed = state[name].clone()
            changed.view(-1)[changed.numel() // 2] += 1e-3
            assert judge({**state, name: changed}).refused, name
        forward.install(before)


def check_lora(trial: Trial) -> None:
    """An adapter in the trainer, and in the engine where that serves the model, against weights with its products added."""
    _check_adapter(trial, trial.policy, (ALL_LINEAR,))


def check_expert_lora(trial: Trial) -> None:
    """The same with fused experts."""
    _check_adapter(trial, load_policy(trial.folder, config=TrainConfig(share_prefix=False)), (ALL_LINEAR, EXPERTS))


def _check_adapter(trial: Trial, policy: PreTrainedModel, targets: tuple[str, ...]) -> None:
    bank = AdapterBank(policy, rank=2, targets=targets)
    merged = copy.deepcopy(trial.reference)
    fresh = bank.adapter(bank.add(rank=2, scaling=1.5, seed=0))
    generator = torch.Generator().manual_seed(1)
    pairs = {name: (a, torch.randn(b.shape, generator=generator) * 0.1) for name, (a, b) in fresh.pairs.items()}
    adapter = Adapter(2, 1.5, pairs)
    for name, (a, b) in pairs.items():
        if (of_expert := split_name(name)) is not None:
            merged.get_parameter(".".join(of_expert[:2])).data[of_expert[2]] += 1.5 * (b @ a)
        else:
            merged.get_submodule(name).weight.data += 1.5 * (b @ a)
    expected = alone(merged)
    assert max((one - other).abs().max() for one, other in zip(expected, trial.expected, strict=True)) > 0.05
    with bank.using(bank.route_all(bank.put(adapter))):
        _compare(_trained(policy, share_prefix=packs_rows(policy)), _answers(expected))
    for forward in trial.served():
        _compare(_scored(forward, adapter), expected)


@torch.inference_mode()
def check_routes(trial: Trial) -> None:
    """The experts that the engine used for a prompt are those of the trainer; others give other numbers."""
    policy = let_replay(load_policy(trial.folder, config=TrainConfig(share_prefix=False)), ModelConfig(route_replay="rollout"))
    forward, lengths = trial.engine("hf"), np.array(list(map(len, SEQUENCES)))
    cache = SlotCache(forward.cache_shape, device=forward.device, max_slots=len(SEQUENCES), max_positions=64)
    tokens = torch.tensor([sequence + [0] * (lengths.max() - len(sequence)) for sequence in SEQUENCES])
    forward.prefill(tokens, cache.prefill(np.arange(len(SEQUENCES)), starts=np.zeros_like(lengths), lengths=lengths))
    routes = np.concatenate([own[:length].numpy() for own, length in zip(cache.routes(), lengths, strict=True)])
    _compare(_trained(policy, share_prefix=True, routes=routes), _answers(trial.expected))
    changed = torch.cat(_trained(policy, share_prefix=True, routes=(routes + 1) % 2))
    assert (changed - torch.cat(_answers(trial.expected))).abs().max() > 10 * TOLERANCE


CHECKS = {
    "packed": check_packed, "unpacked": check_unpacked, "fast": check_fast, "hf": check_hf, "names": check_names, "proof": check_proof,
    "lora": check_lora, "expert_lora": check_expert_lora, "routes": check_routes}
assert list(CHECKS) == list(COLUMNS)


# -- numbers -----------------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def alone(model: PreTrainedModel) -> list[torch.Tensor]:
    """Log-probabilities [L - 1] of each sequence's tokens after the first, from transformers' own code."""
    found = []
    for tokens in map(torch.tensor, SEQUENCES):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        found.append(logits[:-1].gather(1, tokens[1:, None])[:, 0])
    return found


def _answers(logprobs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [own[-len(answer) :] for own, (_, answer) in zip(logprobs, SAMPLES, strict=True)]


def _compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, atol=TOLERANCE, rtol=0)


def _batch(chosen: list[int]) -> Batch:
    sequences = [SEQUENCES[i] for i in chosen]
    prompts = np.array([len(SEQUENCES[i]) - len(SAMPLES[i][1]) for i in chosen])
    return Batch.of_next_tokens(
        np.concatenate(sequences).astype(np.int32),
        np.concatenate([np.arange(len(sequence)) >= prompt for sequence, prompt in zip(sequences, prompts, strict=True)]),
        lengths=[len(sequence) for sequence in sequences], columns={}, losses=(),
        shared=SharedPrompts(np.array([SAMPLES[i][0] for i in chosen]), prompts))


@torch.no_grad()
def _trained(policy: PreTrainedModel, *, share_prefix: bool, routes: np.ndarray | None = None) -> list[torch.Tensor]:
    """Log-probabilities of the answers, all in one row; `routes` [T, K] are the experts of all sequences' tokens."""
    row = pack_row(replace(_batch(list(range(len(SAMPLES)))), routes=routes), share_prefix=share_prefix)
    return list(token_logprobs(policy, row).split([len(answer) for _, answer in SAMPLES]))


@torch.inference_mode()
def _scored(forward: Forward, adapter: Adapter | None = None) -> list[torch.Tensor]:
    length = max(map(len, SEQUENCES))
    tokens = torch.tensor([sequence + [0] * (length - len(sequence)) for sequence in SEQUENCES])
    lora = None
    if adapter is not None:
        stack = AdapterStack(forward.lora_groups, device=forward.device)
        stack.place([adapter])
        lora = AdapterRows(stack, np.zeros(tokens.numel(), np.int64))
    logits = torch.cat(list(forward.score(tokens, lora=lora))).unflatten(0, tokens.shape).log_softmax(-1)
    picked = logits[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0]
    return [own[: len(sequence) - 1] for own, sequence in zip(picked, SEQUENCES, strict=True)]


@torch.inference_mode()
def _check_engine(trial: Trial, forward: Forward) -> None:
    """A prefill of all prompts together, then the answers token by token; then all tokens at once."""
    prompts = [PROMPTS[prompt] for prompt, _ in SAMPLES]
    lengths = np.array(list(map(len, prompts)))
    tokens = torch.tensor([prompt + [0] * (lengths.max() - len(prompt)) for prompt in prompts])
    cache = SlotCache(forward.cache_shape, device=forward.device, max_slots=len(prompts), max_positions=64)
    begun = lengths // 2  # the rest of each prompt goes on from what is cached of it
    slots = np.arange(len(prompts))
    forward.prefill(tokens[:, : begun.max()], cache.prefill(slots, starts=np.zeros_like(begun), lengths=begun))
    rest = torch.tensor([prompt[b:] + [0] * ((lengths - begun).max() - len(prompt) + b) for prompt, b in zip(prompts, begun, strict=True)])
    steps = [forward.prefill(rest, cache.prefill(slots, starts=begun, lengths=lengths - begun))]
    answers = [answer for _, answer in SAMPLES]
    for i in range(max(map(len, answers)) - 1):
        steps.append(forward.decode(torch.tensor([(answer + [0] * 9)[i] for answer in answers]), cache.step(lengths + i)))
    logprobs = torch.stack(steps, dim=1).log_softmax(-1)
    decoded = [own[: len(answer)].gather(1, torch.tensor(answer)[:, None])[:, 0] for own, answer in zip(logprobs, answers, strict=True)]
    _compare(decoded, _answers(trial.expected))
    _compare(_scored(forward), trial.expected)


# -- the document ------------------------------------------------------------------------------------------------------------------------

HEAD = """\
# Which models work

This table is made by `python tests/families.py --write`; `make check` compares it with what the code does. Each row is a tiny model
with random weights of that family, built from transformers' own configuration class, in float32. A cell says yes where the numbers are
those of transformers' eager forward of each sequence alone, to {tolerance:g} nats; else it has the number of the sentence with which the
model is refused before anything starts. A family that is not listed is checked in the same way when its model is loaded: a row of
sequences, and the embedded engine's forward, must agree with transformers' own code, or the model is refused.
"""

PROOF = """\
vLLM proves the families that it serves by comparing the same tensors with what its kernels compute with, experts and routers included, as
far as it can read each of them back ([proof](weights.md#proof)). SGLang shows nothing, so that the canary alone decides.
"""

IMAGES = """\
## Models that read images

Families that [read images](images.md), each as a tiny random model with its processor, on rows that share a prompt of two images.
"""

TAIL = """\
## What is bounded

- LongRoPE (Phi-3 long) changes its rotary frequencies for a whole call as soon as one sequence in it passes the original context, and
  dynamic NTK where one passes the configured context. Up to there all sequences have the same frequencies; that length is taken as the
  model's context, and a longer sequence is refused. vLLM uses the long frequencies for all sequences if its `--max-model-len` passes the
  original context: set `inference.max_context` to at most that.
- Soft caps (Gemma 2) and sinks (GPT-OSS) are not in torch's fused attention. The trainer and the embedded engine write the scores out,
  which takes memory for all pairs of tokens of the sequences that are computed together.
- Keys and values of all layers lie in one cache, with heads as large as the largest of any layer (Gemma 4), of keys or of values
  (DeepSeek).
- A model with parts for sound, or for pictures that are not read, trains on text alone. Where transformers loads its text model by itself
  (Qwen3.5), the other parts are not in what is published, under the names of the whole; where it loads all, all of it is.
"""


def document(cells: dict[str, dict[str, str]], images: dict[str, dict[str, str]]) -> str:
    """The whole of docs/models.md.

    Args:
        cells: what `try_all` returns, by the family's name.
        images: what `image_world.try_all` returns, by model type.
    """
    notes: dict[str, int] = {}
    lines = [HEAD.format(tolerance=TOLERANCE), "| Family | `model_type` | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines.append("|---|---|" + "---|" * len(COLUMNS))
    for family in FAMILIES:
        row = [_shown(cell, notes) for cell in cells[family.name].values()]
        name = family.name + (f" ({family.remark})" if family.remark else "")
        lines.append(f"| {name} | {family.model_type} | " + " | ".join(row) + " |")
    lines += ["", *(f"{number}. {note}" for note, number in notes.items()), "", PROOF, "## The columns", ""]
    lines += _explained(COLUMNS)
    titles = [title for title, _ in image_world.COLUMNS.values()]
    lines += ["", IMAGES, f"| `model_type` | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    lines += [f"| {model_type} | " + " | ".join(row.values()) + " |" for model_type, row in images.items()]
    return "\n".join([*lines, "", *_explained(image_world.COLUMNS), "", TAIL])


def _explained(columns: dict[str, tuple[str, str]]) -> list[str]:
    return [textwrap.fill(f"- **{title}.** {text}", 138, subsequent_indent="  ") for title, text in columns.values()]


def _shown(cell: str, notes: dict[str, int]) -> str:
    """"yes", or the number of its sentence; sentences that differ in names alone share one."""
    if cell in (YES, NONE):
        return cell
    note = re.sub(r"\w+(ForCausalLM|LMHeadModel|Attention)\b", "The model", cell)
    note = re.sub(r" \(model type '\w+'\)", "", re.sub(r"has \w+ layers", "has layers of another kind than attention", note))
    note = note[0].upper() + note[1:] + "."
    return f"no, {notes.setdefault(note, len(notes) + 1)}"


def main(arguments: list[str]) -> int:
    """Write or compare; 1 where the document is not what the code makes."""
    logging.set_verbosity_error()
    images = {model_type: image_world.try_all(model_type) for model_type in IMAGE_FAMILIES}
    made = document({family.name: try_all(family) for family in FAMILIES}, images)
    if "--write" in arguments:
        DOCUMENT.write_text(made, encoding="utf-8")
    elif DOCUMENT.read_text(encoding="utf-8") != made:
        print(f"{DOCUMENT} is not what the code makes; run `python tests/families.py --write` and look at what changed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
