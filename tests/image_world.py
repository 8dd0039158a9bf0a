"""A small model that reads images, with sequences: checked against transformers' own forward of each alone, for docs/models.md."""

import copy
import tempfile
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from image_models import file_of, make_folder, picture
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.image_sources import ImageSource
from offbeat.data.image_store import FIRST_ID, find_images
from offbeat.data.packing import pack_row
from offbeat.engine.forward import fingerprint_tensors
from offbeat.engine.loader import load_engine
from offbeat.engine.lora import AdapterRows, AdapterStack
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import SamplingParams
from offbeat.engine.versions import read_version
from offbeat.errors import ModelError
from offbeat.model.hf_io import read_safetensors
from offbeat.model.images import IMAGE_FAMILIES, images_of
from offbeat.model.logprobs import packs_rows, token_logprobs
from offbeat.model.lora import AdapterBank
from offbeat.model.peft_io import Adapter
from offbeat.trainer.policy import load_policy
from offbeat.trainer.snapshots import ModelSnapshot
from offbeat.trainer.state import full_state
from shared_image_reader import reader_in_process

COLUMNS = {
    "packed": (
        "Trainer, packed", "Images in packed rows, with shared prompts and without: log-probabilities and gradients, the tower's included,"
        " are those of each sequence alone, to 1e-5 in float32."),
    "embedded": (
        "Embedded, general", "The log-probabilities of samples of prompts with images, with parts of the prompt from the cache, are the"
        " trainer's, to 1e-4 in float32."),
    "names": (
        "Published names", "As in the table above; the fingerprint covers the tower."),
    "lora": (
        "LoRA", "An adapter of the language part, in the trainer and in the embedded engine."),
}
"""Columns of docs/models.md."""

TEXT, ANSWERS = [5, 9, 20, 3], [[8, 19, 2, 30], [21, 7, 9], [6, 12]]


class World:
    """A random model of a family, and a batch: two answers share a prompt of two images, and a third has another image."""

    def __init__(self, folder, family, *, store=None):
        """`store` is the folder for images, which is made beside the model's by default; a model that is there already is used."""
        self.folder = folder / family
        if not self.folder.exists():
            make_folder(self.folder, family)
        reader = reader_in_process(self.folder, store or folder / f"{family}.images")
        self.store = reader.store
        images = [reader.read(ImageSource(data=file_of(picture(seed, size=size))), "row").tokens
                  for seed, size in enumerate([(40, 28), (28, 40), (30, 30)])]
        prompts = [[4, *images[0], *TEXT, *images[1], 11], [7, *images[2], *TEXT]]
        self.sequences = [np.array([*prompts[prompt], *answer], np.int32) for prompt, answer in zip((0, 0, 1), ANSWERS, strict=True)]
        self.prompt_lens = [len(prompts[prompt]) for prompt in (0, 0, 1)]
        self.policy = load_policy(str(self.folder), config=TrainConfig(), images=self.store.folder)

    def batch(self):
        trained = np.concatenate([np.arange(len(each)) >= start for each, start in zip(self.sequences, self.prompt_lens, strict=True)])
        return Batch.of_next_tokens(
            np.concatenate(self.sequences), trained, lengths=list(map(len, self.sequences)), columns={}, losses=(),
            shared=SharedPrompts(np.array([0, 0, 1]), np.array(self.prompt_lens)))

    def alone(self, model):
        """Log-probabilities of the answers by transformers' forward of each sequence with its processor's arrays."""
        found, token = [], model.config.image_token_id
        for sequence, start in zip(self.sequences, self.prompt_lens, strict=True):
            images = [image for image, _ in find_images(sequence, self.store)]
            tokens = torch.from_numpy(np.where(sequence >= FIRST_ID, token, sequence).astype(np.int64))[None]
            arrays = {
                name: torch.from_numpy(np.concatenate([image.arrays[name] for image in images], axis=axis))
                for name, axis in IMAGE_FAMILIES[model.config.model_type].joins.items() if name in images[0].arrays}
            named = {"gemma3": "token_type_ids"}.get(model.config.model_type, "mm_token_type_ids" if "image_grid_thw" in arrays else "")
            kinds = {named: (tokens == token).int()} if named else {}
            logits = model(input_ids=tokens, use_cache=False, **arrays, **kinds).logits[0]
            found.append(logits.log_softmax(-1)[start - 1 : -1].gather(1, tokens[0, start:, None])[:, 0])
        return torch.cat(found)

    @cached_property
    def reference(self):
        return AutoModelForImageTextToText.from_pretrained(self.folder, attn_implementation="eager").eval()

    @cached_property
    def expected(self):
        """Log-probabilities of the answers, [M]; the reference then has their gradients."""
        logprobs = self.alone(self.reference)
        logprobs.sum().backward()
        return logprobs.detach()

    def scored(self, policy, *, share_prefix):
        """Log-probabilities of the answers, [M], of a packed row."""
        row = pack_row(self.batch(), share_prefix=share_prefix)
        return token_logprobs(policy, row)[torch.from_numpy(row.batch_index)]

    def check_trained(self, *, share_prefix):
        """Compare log-probabilities and gradients of a packed row with the reference's."""
        expected, wanted = self.expected, {name: parameter.grad for name, parameter in self.reference.named_parameters()}
        assert packs_rows(self.policy)
        self.policy.zero_grad()
        logprobs = self.scored(self.policy, share_prefix=share_prefix)
        assert torch.allclose(logprobs, expected, atol=1e-5, rtol=0)
        logprobs.sum().backward()
        for name, parameter in self.policy.named_parameters():
            if wanted[name] is not None:
                assert (parameter.grad - wanted[name]).norm() <= 1e-5 * max(wanted[name].norm(), 1), name
        tower = images_of(self.policy).family.tower
        assert any(name.startswith(tower) and grad is not None and grad.norm() > 0 for name, grad in wanted.items())

    @cached_property
    def engine(self):
        return load_engine(EngineOptions(
            model=str(self.folder), images=str(self.store.folder), max_running=16, max_prefill_per_round=24, max_context=256))

    def check_sampled(self):
        """Compare the log-probabilities of samples with the trainer's."""
        one, other = (self.store.get(int(ids[ids >= FIRST_ID][0])).tokens.tolist() for ids in self.sequences[::2])
        text = [(5 + 3 * i) % 40 + 3 for i in range(21)]
        prompts = [[4, *one, 7, *text], [4, *one, 9], [4, *other, 9], [4, *text, *other, *one, 3, *text], [5, 6, 7]]
        for _ in range(2):  # the second time, beginnings of prompts are in the cache, also up to the middle of an image
            answers = self.engine.generate(prompts, SamplingParams(max_new_tokens=6, seed=3, ignore_eos=True), n=2)
            for prompt, outputs in zip(prompts, answers, strict=True):
                for output in outputs:
                    found, wanted = torch.tensor(output.logprobs), score(self.policy, prompt, output.token_ids)
                    assert torch.allclose(found, wanted, atol=1e-4, rtol=0)
        assert self.engine.num_cached_tokens > 0

    def check_names(self):
        """Compare the names of what is published with those of the folder, and the fingerprints of trainer and engine."""
        policy = copy.deepcopy(self.policy)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.01)
        snapshot = ModelSnapshot(policy, self.folder, full_state(policy, dtype="float32", keep=True), "float32")
        forward = self.engine._forward
        before = forward.tensors()
        with tempfile.TemporaryDirectory() as parent:
            snapshot.write(folder := Path(parent) / "v1")
            assert dict(read_safetensors(folder)).keys() == dict(read_safetensors(self.folder)).keys()
            assert AutoModelForImageTextToText.from_pretrained(folder).config.model_type == self.reference.config.model_type
            forward.install(read_version(forward, str(folder)))
        assert fingerprint_tensors(forward.tensors()) == snapshot.fingerprint()
        forward.install(forward.prepare(before))

    def check_lora(self):
        """Compare an adapter, in the trainer and in the engine, with weights with its products added."""
        bank = AdapterBank(self.policy, rank=2)
        fresh = bank.adapter(bank.add(rank=2, scaling=1.5, seed=0))
        generator = torch.Generator().manual_seed(1)
        adapter = Adapter(2, 1.5, {name: (a, torch.randn(b.shape, generator=generator) * 0.1) for name, (a, b) in fresh.pairs.items()})
        merged, plain = copy.deepcopy(self.reference), self.expected
        for name, (a, b) in adapter.pairs.items():
            merged.get_submodule(name).weight.data += 1.5 * (b @ a)
        with torch.no_grad():
            expected = self.alone(merged)
        assert (expected - plain).abs().max() > 0.05
        with bank.using(bank.route_all(bank.put(adapter))), torch.no_grad():
            assert torch.allclose(self.scored(self.policy, share_prefix=True), expected, atol=1e-4, rtol=0)
        forward, prompt = self.engine._forward, self.sequences[2][: self.prompt_lens[2]].tolist()
        stack = AdapterStack(forward.lora_groups, device=forward.device)
        stack.place([adapter])
        with torch.inference_mode():
            tokens = torch.tensor(self.sequences[2].astype(np.int64))[None]
            [logits] = forward.score(tokens, lora=AdapterRows(stack, np.zeros(tokens.numel(), np.int64)))
        answer = tokens[0, len(prompt) :, None]
        found = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, answer)[:, 0]
        assert torch.allclose(found, expected[-len(answer) :], atol=1e-4, rtol=0)


def score(policy, prompt, answer):
    """Return the trainer's log-probabilities of an answer [L] ids, [L]."""
    tokens = np.array([*prompt, *answer], np.int32)
    batch = Batch.of_next_tokens(tokens, np.arange(len(tokens)) >= len(prompt), lengths=[len(tokens)], columns={}, losses=())
    with torch.no_grad():
        return token_logprobs(policy, pack_row(batch, share_prefix=False))


def try_all(family):
    """Return each column's cell: "yes", or the sentence with which it is refused.

    Raises:
        AssertionError: numbers are wrong though nothing was refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), family)
        checks = {
            "packed": lambda: [world.check_trained(share_prefix=shared) for shared in (True, False)], "embedded": world.check_sampled,
            "names": world.check_names, "lora": world.check_lora}
        return {column: _cell(checks[column]) for column in COLUMNS}


def _cell(check):
    try:
        check()
    except ModelError as exc:
        return str(exc)
    return "yes"
