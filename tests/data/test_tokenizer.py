"""Character tokenizers, tokenizer folders, chat templates, and the absence of torch."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from chats import TEXT_ALPHABET
from offbeat.data.tokenizer import DEFAULT_ALPHABET, DEFAULT_CHAT_TEMPLATE, Tokenizer, character_tokenizer, load_tokenizer
from offbeat.errors import ModelError

TORCH_FREE = (
    "offbeat.data.tokenizer", "offbeat.data.row", "offbeat.data.sources", "offbeat.data.tasks", "offbeat.data.dataset",
    "offbeat.data.prompt", "offbeat.data.stream", "offbeat.user_code.functions", "offbeat.rollout.rewards.exact_match",
    "offbeat.rollout.rewards.math", "offbeat.rollout.rewards.countdown", "offbeat.algorithms.credit", "offbeat.algorithms.experience",
)
TEXT = character_tokenizer(TEXT_ALPHABET)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "3+4"}]


def run_python(code, **env):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=100, check=False)


def test_nothing_here_imports_torch_even_when_a_chat_is_rendered_and_a_folder_read(tmp_path):
    character_tokenizer().save(tmp_path)
    code = (
        f"import sys, {', '.join(TORCH_FREE)}\n"
        f"offbeat.data.tokenizer.load_tokenizer({str(tmp_path)!r}).chat([dict(role='user', content='1')])\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@settings(max_examples=50, deadline=None)
@given(st.text(TEXT_ALPHABET.replace("<", ""), max_size=40))  # without it, no text spells a special token
def test_text_of_the_alphabet_survives_encoding(text):
    ids = TEXT.encode(text)
    assert len(ids) == len(text)
    assert TEXT.decode(ids) == text


def test_the_default_vocabulary_is_small_and_has_its_special_tokens():
    tokenizer = character_tokenizer()
    assert tokenizer.vocab_size == len(DEFAULT_ALPHABET) + 3 == 54
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert tokenizer.encode("0z") == [3, 3 + DEFAULT_ALPHABET.index("z")]


def test_an_unknown_character_is_unk_and_special_tokens_are_dropped_on_decoding():
    tokenizer = character_tokenizer("ab")
    assert tokenizer.encode("aéb<eos>") == [3, 2, 4, 0]
    assert tokenizer.decode([3, 4, 0, 1]) == "ab"
    assert tokenizer.decode([3, 0], skip_special_tokens=False) == "a<eos>"


def test_the_default_chat_template_ends_where_the_assistant_is_to_speak():
    tokenizer = character_tokenizer()
    assert tokenizer.decode(tokenizer.chat(CHAT)) == "system: be brief\nuser: 3+4\nassistant: "
    turns = [*CHAT, {"role": "assistant", "content": "7"}, CHAT[1]]
    assert tokenizer.chat(turns).count(tokenizer.eos_token_id) == 1


def test_a_saved_tokenizer_loads_as_the_same(tmp_path):
    saved = character_tokenizer("abc :\n", chat_template="{{ messages[0]['content'] }}a")
    saved.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("cab\n:") == saved.encode("cab\n:")
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.vocab_size) == (0, 1, 9)
    assert loaded.chat([{"role": "user", "content": "b"}]) == saved.encode("ba")


def test_a_chat_template_file_in_the_folder_is_honoured(tmp_path):
    character_tokenizer("ab", chat_template=None).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}b")
    assert load_tokenizer(tmp_path).chat([{"role": "user", "content": "a"}]) == [3, 4]


def test_truncation_and_padding_stored_in_a_folder_do_not_cut_or_fill_prompts(tmp_path):
    character_tokenizer("ab").save(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0, "pad_token": "<pad>"}
    file.write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).encode("abab") == [3, 4, 3, 4]


def test_a_folder_of_another_tokenizer_class_loads(tmp_path):
    character_tokenizer("ab").save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "Qwen2Tokenizer", "pad_token": None}
    file.write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ba") == [4, 3]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_a_missing_chat_template_says_so():
    with pytest.raises(ModelError, match=r"'characters' has no chat template; set .* to a file .*data.chat_template = false"):
        character_tokenizer(chat_template=None).chat(CHAT)


def test_a_chat_template_that_refuses_says_why():
    tokenizer = character_tokenizer(chat_template="{{ raise_exception('system role not supported') }}")
    with pytest.raises(ModelError, match="refuses messages with roles system, user: system role not supported"):
        tokenizer.chat(CHAT)


@pytest.mark.parametrize(("template", "why"), [
    ("{{ 1 // (messages | length - 1) }}", "modulo by zero|division"), ("{% for _ in range(200000) %}{% endfor %}", "Range too big"),
    ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion")], ids=["arithmetic", "range", "recursion"])
def test_whatever_a_chat_template_raises_is_a_model_error(template, why):
    tokenizer = character_tokenizer(chat_template=template)
    with pytest.raises(ModelError, match=f"refuses messages with roles user: .*({why})"):
        tokenizer.chat([{"role": "user", "content": "1"}])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_without_a_file_names_it(tmp_path, name):
    character_tokenizer().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ModelError, match=f"has no {name}; it needs tokenizer.json and tokenizer_config.json"):
        load_tokenizer(tmp_path)


def test_a_broken_file_and_a_missing_end_token_are_model_errors(tmp_path):
    character_tokenizer().save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "eos_token"}))
    with pytest.raises(ModelError, match="has no end token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_path_that_is_no_folder_is_not_looked_for_on_the_hub(tmp_path):
    with pytest.raises(ModelError, match="does not exist; give a folder"):
        load_tokenizer(tmp_path / "nothing")


def test_an_unreachable_hub_is_one_clear_sentence():
    code = (
        "from offbeat.data.tokenizer import load_tokenizer\nfrom offbeat.errors import ModelError\n"
        "try: load_tokenizer('offbeat-tests/absent')\nexcept ModelError as exc: print(exc)"
    )
    done = run_python(code, HF_HUB_OFFLINE="1")
    assert "tokenizer 'offbeat-tests/absent' is not a folder here and could not be fetched from the hub" in done.stdout, done.stderr


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_an_alphabet_must_hold_different_characters(alphabet):
    with pytest.raises(ModelError, match="each character once"):
        character_tokenizer(alphabet)


# Where a prompt begins and a turn ends


def with_bos(*, chat_template=None):
    """A tokenizer that puts <s> before a text and <eos> behind it, as Llama's and T5's do."""
    tokenizer = character_tokenizer(chat_template=chat_template)
    tokenizer.hf.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.hf.bos_token_id
    tokenizer.hf.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A <eos>", special_tokens=[("<s>", bos), ("<eos>", 0)])
    return tokenizer, bos


def test_a_prompt_begins_with_what_the_tokenizer_itself_puts_before_a_text(tmp_path):
    tokenizer, bos = with_bos()
    assert tokenizer.hf("12")["input_ids"] == [bos, 4, 5, 0]  # what is put behind it would end the answer
    assert tokenizer.prompt("12") == [bos, 4, 5]
    assert tokenizer.prompt("<s>12") == [bos, 4, 5], "a text that spells it out has it once"
    assert tokenizer.prompt("") == [bos]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).prompt("12") == [bos, 4, 5]
    assert character_tokenizer().prompt("12") == [4, 5]


def test_a_chat_has_the_bos_that_its_template_writes_and_no_other():
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer, bos = with_bos(chat_template=template)
    assert tokenizer.chat([{"role": "user", "content": "12"}]) == [bos, 4, 5]
    tokenizer, _ = with_bos(chat_template=template.removeprefix("{{ bos_token }}"))
    assert tokenizer.chat([{"role": "user", "content": "12"}]) == [4, 5]


TURNS = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}END\n{% endfor %}"


@pytest.mark.parametrize(("template", "end"), [
    (DEFAULT_CHAT_TEMPLATE, "<eos>"), (TURNS.replace("END", "<end_of_turn>"), "<end_of_turn>"),
    (TURNS.replace("END", " <end_of_turn>"), "<end_of_turn>"),
    (TURNS.replace("END", ""), None), (TURNS.replace("END", "###"), None), (TURNS.replace("END", "<unk>"), "<unk>"), (None, None),
    ("{{ raise_exception('system first') }}", None), ("{{ messages[0]['content'] }}<end_of_turn>", None),
])
def test_the_end_of_a_turn_is_the_special_token_that_the_template_writes_after_an_answer(template, end):
    tokenizer = character_tokenizer(TEXT_ALPHABET, chat_template=template)
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    assert tokenizer.end_of_turn_id == (tokenizer.special_tokens.get(end) if end else None)


def test_special_tokens_are_known_by_their_text():
    tokenizer = character_tokenizer()
    special = tokenizer.special_tokens
    assert (special.get("<eos>"), special.get("1"), special.get("<s>")) == (0, None, None)
    assert (tokenizer.special_text_in("1<eos>2"), tokenizer.special_text_in("12")) == ("<eos>", "")


CALLED = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}]}]
CALL = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} ARGUMENTS</call>{% endfor %}"
    "{% endfor %}")


@pytest.mark.parametrize(("written", "is_text", "shown"), [
    ("{{ c.function.arguments | tojson }}", False, '{"city": "Paris"}'),
    ("{{ 'args ' + c.function.arguments }}", True, 'args {"city": "Paris"}'),
    ("{{ c.function.arguments }}", True, '{"city": "Paris"}'),
    ("{% for key, value in c.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}", False, "city=Paris"),
    ("{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}", False, '{"city": "Paris"}'),
], ids=["JSON of an object", "joined with text", "printed", "its items", "either"])
def test_a_template_is_given_the_arguments_of_calls_in_the_form_that_it_takes(written, is_text, shown):
    tokenizer = character_tokenizer(chat_template=CALL.replace("ARGUMENTS", written))
    assert tokenizer.form().arguments_as_text is is_text
    for arguments in ('{"city": "Paris"}', {"city": "Paris"}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert tokenizer.chat_text([*CALLED[:1], {**CALLED[1], "tool_calls": [call]}]) == f"?<call>f {shown}</call>"


def test_the_bytes_of_a_token_are_its_own_even_where_they_are_part_of_a_character():
    backend = Backend(models.BPE({"a": 0, "Ġ": 1, "ð": 2, "Ł": 3, "<s>": 4}, []))
    backend.decoder = decoders.ByteLevel()
    level = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>"), "x")
    assert [level.token_bytes(token) for token in range(5)] == [b"a", b" ", b"\xf0", b"\x9f", b"<s>"]
    backend = Backend(models.BPE({"\u2581the": 0, "<0xE2>": 1, "<s>": 2}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>"), "x")
    assert [pieces.token_bytes(token) for token in range(3)] == [b" the", b"\xe2", b"<s>"]
    assert TEXT.token_bytes(TEXT.encode("é")[0] if "é" in TEXT_ALPHABET else TEXT.encode("7")[0]) in (b"7", "é".encode())
