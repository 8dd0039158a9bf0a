"""A chat of several turns, templates in the manner of ChatML, and a byte-level tokenizer for them."""

import string

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offbeat.data.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
OPENING = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
MARKED = OPENING + (
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
MARKED_WITHOUT_END = MARKED.replace("{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", (
    "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"))
FORGETS_THOUGHTS = OPENING + (
    "{{ message['content'] if loop.last else message['content'].split('=')[-1] }}{% else %}{{ message['content'] }}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TEXT_ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \t\n"
"""All printable ASCII characters, for a character tokenizer."""
SPECIAL = ("<|im_start|>", "<|im_end|>")
CHAT = [
    {"role": "system", "content": "add"}, {"role": "user", "content": "3+4"}, {"role": "assistant", "content": "3+4=7"},
    {"role": "user", "content": "and 5?"}, {"role": "assistant", "content": "7+5=12"}]


def words(template: str | None, *merges: tuple[str, str]) -> Tokenizer:
    """A byte-level tokenizer with ChatML's special tokens, which joins the given pairs of bytes."""
    vocab = {token: i for i, token in enumerate([
        "<|endoftext|>", *SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)])}
    backend = Backend(models.BPE(vocab, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=list(SPECIAL), chat_template=template)
    return Tokenizer(hf, "words")


WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\\n' }}{% for tool in tools %}{{ tool['name'] }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<call>' + call['function']['name'] + (call['function']['arguments'] | tojson) + '</call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('' if thinks else '<quiet>') }}{% endif %}")
"""Writes tools, calls of them between added tokens, and the variable `thinks`."""


def words_with_tools() -> Tokenizer:
    """A tokenizer with `WITH_TOOLS`, which has added tokens around calls."""
    tokenizer = words(WITH_TOOLS)
    tokenizer.hf.add_tokens(["<call>", "</call>"])
    return tokenizer
