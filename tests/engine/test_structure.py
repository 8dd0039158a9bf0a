"""Texts of a random model keep to their structure, drawn from the model's distribution over the tokens that may follow."""

import json
import math
import re
import string

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from offbeat.chat.shaping import Shaping, Structure
from offbeat.config.model import TinyConfig
from offbeat.data.tokenizer import Tokenizer, character_tokenizer
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request, SamplingParams
from offbeat.engine.structure import MAX_CACHED, Grammar, Grammars, vocabulary_of
from offbeat.engine.versions import VersionSource
from offbeat.errors import RefusedError
from offbeat.model.load import load_causal_lm
from offbeat.model.tiny import build_tiny

NAME = {"type": "string", "minLength": 1, "maxLength": 8}
SCHEMAS = [
    {"type": "object", "properties": {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "object", "properties": {"city": NAME, "unit": {"enum": ["celsius", "fahrenheit", None]}}, "required": ["city", "unit"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {
        "steps": {"type": "array", "maxItems": 2, "items": {
            "type": "object", "properties": {"text": NAME, "value": {"type": "number"}}, "required": ["text", "value"],
            "additionalProperties": False}},
        "final": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}, "required": ["steps", "final"], "additionalProperties": False},
    {"$defs": {"node": {"type": "object", "properties": {"left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                        "required": ["left"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
    {"type": "object", "properties": {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "pattern": "^[A-F0-9]{4}$"}},
     "required": ["day", "id"], "additionalProperties": False},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer", "minimum": -5, "maximum": 5}},
                "required": ["kind", "n"], "additionalProperties": False},
               {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"], "additionalProperties": False}]},
    {"const": {"a": [1, "x", True]}},
]
EXPRESSIONS = [r"[a-c]{2,5}-\d+", r"(yes|no)\.?", r"\+49 \d{3}/\d{4,6}", r"(a|b)*c"]
GRAMMARS = [
    ('start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/', r"\d{1,3}(\+\d{1,3})*"),
    ('root ::= "<" [a-z]{1,4} ">"', r"<[a-z]{1,4}>")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A random model over the characters of a keyboard."""
    made = tmp_path_factory.mktemp("keyboard")
    tokenizer = character_tokenizer(string.printable[:95] + "\n")
    tokenizer.save(made)
    build_tiny(
        made, tiny=TinyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32,
                              max_positions=512),
        vocab_size=tokenizer.vocab_size + 6, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, seed=1)
    return str(made)


@pytest.fixture(scope="module")
def engine(folder) -> EmbeddedEngine:
    return load_engine(EngineOptions(model=folder, max_running=64))


def params(structure: Structure | None, **settings) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 120, "seed": 7, **settings}, shaping=Shaping(structure=structure))


def finished(engine: EmbeddedEngine, outputs: list[Output]) -> list[str]:
    """Texts of the samples that ended by themselves, without the end token."""
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert ended and all(output.token_ids[-1] == engine.tokenizer.eos_token_id for output in ended)
    assert all(math.isfinite(logprob) for output in outputs for logprob in output.logprobs)
    return [engine.tokenizer.decode(output.token_ids) for output in ended]


def test_every_structure_is_kept_in_one_batch_with_plain_samples_over_a_switch(engine, folder):
    structures = {f"schema {i}": Structure.of_schema(schema) for i, schema in enumerate(SCHEMAS)}
    structures |= {f"regex {i}": Structure("regex", regex) for i, regex in enumerate(EXPRESSIONS)}
    structures |= {f"grammar {i}": Structure("grammar", grammar) for i, (grammar, _) in enumerate(GRAMMARS)}
    structures["object"] = Structure("json_object")
    alone = engine.generate([[9, 8, 7]], params(None), n=2)[0]
    told: dict[str, list[Output]] = {name: [] for name in (*structures, "plain")}
    for name, structure in structures.items():
        engine.submit(Request(id=name, prompt=[9, 8, 7], params=params(structure), n=2))
    engine.submit(Request(id="plain", prompt=[9, 8, 7], params=params(None), n=2))
    engine.stage(1, VersionSource(folder), engine.prepare(folder))
    for step in range(10**6):
        if step == 6:
            engine.switch(1, "recompute")
        for event in engine.step():
            assert isinstance(event.result, Output), event
            told[event.request_id].append(event.result)
        if not engine.has_work:
            break
    for i, schema in enumerate(SCHEMAS):
        for text in finished(engine, told[f"schema {i}"]):
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    for i, regex in enumerate(EXPRESSIONS):
        assert all(re.fullmatch(regex, text) for text in finished(engine, told[f"regex {i}"]))
    for i, (_, regex) in enumerate(GRAMMARS):
        assert all(re.fullmatch(regex, text) for text in finished(engine, told[f"grammar {i}"]))
    assert all(isinstance(json.loads(text), dict) for text in finished(engine, told["object"]))
    assert [o.token_ids for o in sorted(told["plain"], key=lambda o: o.index)] == [o.token_ids for o in alone]


def test_choices_are_drawn_from_the_models_distribution_renormalised_over_what_may_follow(engine, folder):
    choices, num = ["no", "not", "nil", "yes", "a b"], 600
    tokenizer, prompt, temperature = engine.tokenizer, [9, 8, 7], 0.7
    model = load_causal_lm(folder, attention="sdpa")
    texts = [[*tokenizer.encode(choice), tokenizer.eos_token_id] for choice in choices]
    expected, trained = [], []
    for text in texts:  # token by token: the model's distribution over those that some choice goes on with
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *text]])).logits[0].double()[len(prompt) - 1 :] / temperature
        logprob = 0.0
        for place, token in enumerate(text):
            follow = sorted({other[place] for other in texts if other[:place] == text[:place] and len(other) > place})
            logprob += float(logits[place, token] - logits[place, follow].logsumexp(0))
        expected.append(logprob)
        trained.append(float(sum(logits[place].log_softmax(0)[token] for place, token in enumerate(text))))
    settings = {"temperature": temperature, "max_new_tokens": 8}
    structure = Structure.of_choices(choices)
    outputs = [output for seed in range(num // 50) for output in engine.generate(
        [prompt], params(structure, **settings, seed=seed), n=50)[0]]
    counts = [sum(output.token_ids == text for output in outputs) for text in texts]
    assert sum(counts) == num, "every sample is one of the choices, with the end token"
    wanted = np.exp(expected) * num
    assert abs(wanted.sum() - num) < 1e-3 and ((counts - wanted) ** 2 / wanted).sum() < 18.5  # 99.9 % quantile, 4 degrees of freedom
    for output in outputs[:50]:
        assert math.isclose(sum(output.logprobs), expected[texts.index(output.token_ids)], abs_tol=1e-4)
    for output in engine.generate([prompt], params(structure, **settings, scaled_logprobs=True), n=20)[0]:
        assert math.isclose(sum(output.logprobs), trained[texts.index(output.token_ids)], abs_tol=1e-4)


@pytest.mark.parametrize(("structure", "told"), [
    (Structure("json_schema", '{"type": "bogus"}'), "the json_schema of the answer's structure cannot be kept: Invalid type: bogus"),
    (Structure("json_schema", "[1"), "the json_schema of the answer's structure cannot be kept"),
    (Structure("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'), "cannot be kept: Resource 'http://127.0.0.1:9/x' is not present"),
    (Structure("json_schema", '{"not": {"type": "string"}}'), 'Unimplemented keys: ["not"]'),
    (Structure("regex", "("), "the regex of the answer's structure cannot be kept"),
    (Structure("regex", "ba{3,20000}"), "it repeats something {3,20000} times, and at most 9999 are taken"),
    (Structure("json_schema", '{"type": "string", "pattern": "^a{10000}$"}'), "it repeats something {10000} times"),
    (Structure("grammar", "start: other"), "the grammar of the answer's structure cannot be kept")])
def test_a_structure_that_cannot_be_kept_is_refused(engine, structure, told):
    with pytest.raises(RefusedError) as caught:
        engine.submit(Request(id="wrong", prompt=[5], params=params(structure)))
    assert told in str(caught.value) and len(str(caught.value)) < 400 and not engine.has_work


def test_a_structure_ends_so_the_end_token_cannot_be_ignored(engine):
    with pytest.raises(RefusedError, match="ignore_eos cannot be kept beside the structure"):
        engine.submit(Request(id="wrong", prompt=[5], params=params(Structure("json_object"), ignore_eos=True)))


def test_large_structures_stay_within_their_limits(engine):
    grammars, size = Grammars(engine.tokenizer), engine.tokenizer.vocab_size
    properties = {f"p{i}": {"type": "integer"} for i in range(500)}
    large = [
        Structure.of_choices([f'w{i} "\\\n' for i in range(4096)]), Structure("regex", "a{9999}"),
        Structure.of_schema({"type": "object", "properties": properties})]
    for structure in large:
        sample = grammars.compile(structure).for_sample()
        for _ in range(3):
            sample.push(int(np.flatnonzero(sample.allowed(size))[-1]))
        assert not sample.trouble
    nested = grammars.compile(Structure("regex", "((a{1,999}){1,999}){1,999}b" * 40)).for_sample()
    for _ in range(100):
        if not (allowed := np.flatnonzero(nested.allowed(size))).size:
            break
        nested.push(int(allowed[0]))
    assert "too many expressions" in nested.trouble


def test_compiled_structures_are_kept_for_others_up_to_a_bound(engine):
    grammars = Grammars(engine.tokenizer)
    first = grammars.compile(Structure("regex", "a"))
    assert grammars.compile(Structure("regex", "a")) is first
    for i in range(MAX_CACHED):
        grammars.compile(Structure("regex", f"b{i}"))
    assert grammars.compile(Structure("regex", "a")) is not first


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE with an end of turns besides its end of texts, as chat models have."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<end>", "<turn>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(["the cat é über straße 日本", "yes no true false null"] * 20, trainer)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<turn>{% endfor %}"
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=template), "bytes")


def test_tokens_of_several_characters_and_of_parts_of_one_spell_the_text():
    tokenizer = byte_tokenizer()
    grammar = Grammars(tokenizer).compile(Structure("regex", "the (straße|日本)"))
    rng, seen = np.random.default_rng(0), set()
    for _ in range(60):
        sample, ids = grammar.for_sample(), []
        while not sample.ended:
            allowed = np.flatnonzero(sample.allowed(tokenizer.vocab_size + 3))
            assert allowed.size and not sample.trouble
            ids.append(int(rng.choice(allowed)))
            sample.push(ids[-1])
        seen.add((tokenizer.decode(ids), ids[-1]))
    ends = [tokenizer.eos_token_id, tokenizer.end_of_turn_id]
    assert seen == {(text, end) for text in ("the straße", "the 日本") for end in ends}


def test_a_structure_that_becomes_too_complex_ends_its_sample_with_the_reason():
    class Stuck:
        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "too many\n items"

    grammar = Grammar(Stuck(), ends=frozenset([0]), vocab_size=40)
    assert grammar.trouble == "too many items" and not grammar.allowed(40).any()


def test_a_tokenizer_whose_pieces_are_unknown_is_refused():
    backend = Backend(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    with pytest.raises(RefusedError, match="structured outputs are not offered with tokenizer 'words'"):
        vocabulary_of(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"), "words"))
