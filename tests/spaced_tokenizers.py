"""Tokenizers that treat the space at the beginning of a text in their own ways, trained in a few milliseconds. Used by several tests."""

import json
import string
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from offbeat.data.tokenizer import Tokenizer

TEXTS = ["the answer is 12 and 4 hello\n", "What is 2 + 2? 0 = 1 3 5 6 7 8 9 user assistant Paris\n\n", "def f(x):\n    return x\n"] * 20
_BYTES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]


def _sentencepiece(scheme: str) -> Backend:
    """As Llama 2 and Mistral 7B have ("first"), and TinyLlama and Phi-3 ("always", or in the older form, by a normalizer)."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "older":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=420, special_tokens=_BYTES, initial_alphabet=list(string.ascii_lowercase + string.digits), show_progress=False))
    learnt = json.loads(backend.to_str())["model"]  # the trainer's special tokens are none here: bytes are shown
    merges = [tuple(pair) for pair in learnt["merges"]]
    backend.model = models.BPE(learnt["vocab"], merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    return Backend.from_str(json.dumps({**json.loads(backend.to_str()), "added_tokens": []}))


def _unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False))
    return backend


def _byte_level(*, add_prefix_space: bool) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space), decoders.ByteLevel()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["</s>"], show_progress=False))
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "first": lambda: _sentencepiece("first"), "always": lambda: _sentencepiece("always"), "older": lambda: _sentencepiece("older"),
    "unigram": _unigram, "byte level": lambda: _byte_level(add_prefix_space=False),
    "byte level with a space": lambda: _byte_level(add_prefix_space=True)}


@cache
def spaced_tokenizer(kind: str, *, template: str | None = None) -> Tokenizer:
    """Return a tokenizer of one of the kinds, with the added special tokens <|user|>, <|bot|> and <|end|>."""
    hf = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token="</s>", clean_up_tokenization_spaces=False)
    hf.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|user|>", "<|bot|>", "<|end|>")])
    hf.chat_template = template
    return Tokenizer(hf, kind)
