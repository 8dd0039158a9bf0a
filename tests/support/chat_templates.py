"""Small chat templates in the manner of well-known models, and tokenizers that have them, one token per character."""

import string

from offbeat.data.tokenizer import Tokenizer, character_tokenizer

QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{%- endif %}"
    "{{ '<tools>' }}{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{%- endfor %}"
    "{{ '\n</tools>\n<tool_call>\n{\"name\": <function-name>}\n</tool_call><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{%- if (loop.first and message.content) or not loop.first %}{{ '\n' }}{%- endif %}"
    "{{ '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}"
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)

QWEN_THINKING = QWEN.replace(
    "{{ '<|im_start|>assistant\n' + message.content }}",
    "{{ '<|im_start|>assistant\n' }}{%- if loop.last %}{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}"
    "{{ message.content }}",
).replace("{{ '<|im_start|>assistant\n' }}{%- endif %}", "{{ '<|im_start|>assistant\n<think>\n' }}{%- endif %}")
"""Writes the reasoning of the last answer alone, and begins answers with its tag."""

LLAMA = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message.tool_calls is defined %}{%- if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + message.tool_calls[0].function.name + '\", \"parameters\": ' }}"
    "{{ message.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ message.content | tojson }}{{ '<|eot_id|>' }}"
    "{%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{%- if tools and message.role == 'user' and loop.index0 <= 1 %}{{ 'Functions: ' }}{{ tools | tojson }}{{ '\n\n' }}{%- endif %}"
    "{{ message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

MISTRAL = (
    "{{ bos_token }}{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}"
    "{%- elif message.role == 'system' %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}"
    "{%- elif message.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{ '{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}{{ call.function.arguments | tojson }}"
    "{{ ', \"id\": \"' + call.id + '\"}' }}{%- if not loop.last %}{{ ', ' }}{%- endif %}{%- endfor %}{{ ']' + eos_token }}"
    "{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}"
    "{%- elif message.role == 'tool' %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' }}{{ message.content | tojson }}"
    "{{ ', \"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- endif %}{%- endfor %}"
)

PLAIN = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""In the manner of SmolLM2: knows no tools, and fails on messages without content."""

_SPECIAL = {
    QWEN: ("<|im_start|>", "<|im_end|>"), QWEN_THINKING: ("<|im_start|>", "<|im_end|>"), PLAIN: ("<|im_start|>", "<|im_end|>"),
    LLAMA: ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    MISTRAL: ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
}


def tokenizer_with(template: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """Build a tokenizer of characters with a template, whose special tokens are one token each."""
    tokenizer = character_tokenizer("".join(sorted(set(string.printable) | {"▁", "｜"})), chat_template=template)
    special = special or _SPECIAL.get(template, ())
    tokenizer.hf.add_special_tokens({"additional_special_tokens": list(special)})  # type: ignore[reportArgumentType]
    if template in (LLAMA, MISTRAL):
        tokenizer.hf.bos_token = special[0]
    return tokenizer
