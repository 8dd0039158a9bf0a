"""Table of the fields of the four APIs, with their effects at the engine, the recording proxy and the service, and its check.

The readers of the APIs call `check_fields` with the body of a request first. A field that the table does not have is refused, so none is
dropped in silence. docs/api-fields.md is written from the table (`tools/api_fields.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from offbeat.errors import RefusedError

Api = Literal["chat completions", "completions", "Responses", "Messages"]
Surface = Literal["engine", "proxy", "service"]
Use = Literal["acts", "harmless", "run", "refused", ""]
"""`acts`: honoured. `harmless`: accepted, and the answer is the same without it. `run`: accepted, and the setting of the run counts.
`refused`: status 400 where it would change the answer. Empty: the surface does not have that API."""

SURFACES: tuple[Surface, ...] = ("engine", "proxy", "service")
_PLACES: Mapping[Surface, str] = {"engine": "by this engine", "proxy": "in training", "service": "by this service"}
_MAX_SHOWN = 80


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of an API.

    Attributes:
        name: the key; "text.format" is the key `format` of the object `text`.
        engine, proxy, service: its effect there.
        neutral: values besides null that change nothing, such as (0,), so that they are accepted where the field is refused.
        note: for the docs, and for the sentence of a refusal: the field's effect, or its replacement.
    """

    name: str
    engine: Use
    proxy: Use
    service: Use
    neutral: tuple[Any, ...] = ()
    note: str = ""

    def use(self, surface: Surface) -> Use:
        """Effect of the field at a surface, such as "acts"."""
        return getattr(self, surface)


def acts(*names: str, proxy: Use = "acts", service: Use = "acts", neutral: tuple[Any, ...] = (), note: str = "") -> list[Field]:
    """Return fields that the engine honours; the others too, unless another use is given."""
    return [Field(name=name, engine="acts", proxy=proxy, service=service, neutral=neutral, note=note) for name in names]


def harmless(*names: str, note: str = "") -> list[Field]:
    """Return fields that do not change an answer."""
    return [Field(name=name, engine="harmless", proxy="harmless", service="harmless", note=note) for name in names]


def refused(*names: str, neutral: tuple[Any, ...] = (), note: str = "") -> list[Field]:
    """Return fields that are refused everywhere, but for their neutral values."""
    return [Field(name=name, engine="refused", proxy="refused", service="refused", neutral=neutral, note=note) for name in names]


def without_proxy(fields: list[Field]) -> list[Field]:
    """Return the fields of an API that the proxy does not have."""
    return [replace(field, proxy="") for field in fields]


_DRAW = "changes how tokens are drawn"
_FORM = "the form of the answer"
_EFFORT = (
    "given to a chat template that reads `reasoning_effort`; `none` is `enable_thinking = false` to one that reads that; in training,"
    " data.chat_template_kwargs counts")
_VENDOR = "says how a vendor bills, stores or caches"

_SAMPLING = [
    *acts("temperature", "top_p", "top_k", proxy="run", note="the trainer has to know the distribution of what was sampled"),
    *acts("seed", proxy="run", note="equal seeds would make the samples of a group equal"),
]

_SHARED = [
    *acts("presence_penalty", "frequency_penalty", proxy="refused", neutral=(0,), note=_DRAW),
    *acts("repetition_penalty", proxy="refused", neutral=(1,), note=_DRAW),
    *acts("min_p", "min_tokens", proxy="refused", neutral=(0,), note=_DRAW),
    *acts("logit_bias", proxy="refused", neutral=({},), note=_DRAW),
    *acts("allowed_token_ids", "bad_words", proxy="refused", note=_DRAW),
    *refused("length_penalty", neutral=(1,), note="answers are sampled"),
    *acts("stop_token_ids"),
    *acts("ignore_eos", proxy="refused", neutral=(False,)),
    *acts("scaled_logprobs", proxy="refused", service="refused", neutral=(False,), note="of Offbeat's engine"),
    *refused("use_beam_search", neutral=(False,), note="answers are sampled"),
    *acts("structured_outputs", "structured_outputs.json", "structured_outputs.regex", "structured_outputs.choice",
          "structured_outputs.grammar", "structured_outputs.json_object", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
          note=_FORM),
    *refused("guided_json_object", "structural_tag", "json_schema", "regex", "ebnf", note="give it as `structured_outputs`"),
    *harmless("guided_decoding_backend", note="chooses among libraries that give the same answers"),
    *refused("guided_whitespace_pattern", "stop_regex", "logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs",
             "kv_transfer_params", "session_params", neutral=({}, [], ""), note="of other engines"),
    *refused("lora_path", neutral=("",), note="name the adapter in `model`"),
    *refused("truncate_prompt_tokens", neutral=(-1,), note="a prompt is never cut; shorten it"),
    *refused("return_tokens_as_token_ids", "return_hidden_states", "no_stop_trim", neutral=(False,)),
    *refused("skip_special_tokens", "spaces_between_special_tokens", neutral=(True,)),
    *harmless("priority", "request_id", "rid", "cache_salt", note="of other engines; the answer is the same without it"),
]
"""Fields of vLLM's and SGLang's endpoints besides the API's, in chats and completions."""

_CHAT_EXTRAS = [
    *refused("prompt_logprobs", note="POST /v1/score of the engine gives log-probabilities of a prompt"),
    *refused("include_stop_str_in_output", neutral=(False,)),
    *acts("chat_template_kwargs", proxy="refused", neutral=({},),
          note="variables of the chat template; for a run, set data.chat_template_kwargs"),
    *refused("chat_template", note="the tokenizer's own is used"),
    *refused("add_generation_prompt", neutral=(True,)),
    *refused("continue_final_message", "echo", "add_special_tokens", neutral=(False,)),
    *refused("documents", neutral=([],), note="put them into a message"),
    *refused("mm_processor_kwargs", "media_io_kwargs", neutral=({},), note="images are read as the model's own processor does"),
    *refused("include_reasoning", "separate_reasoning", "stream_reasoning", neutral=(True,)),
    *refused("thinking_token_budget", note="bound the whole answer by `max_tokens`"),
]

_OPENAI_HARMLESS = [
    *harmless("user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options",
              "prompt_cache_retention", note=_VENDOR),
    *harmless("moderation", note="nothing is moderated here"),
]

_CHAT = [
    *acts("messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens", "stop", "n", "logprobs",
          "stream", "stream_options", "stream_options.include_usage"),
    *acts("return_token_ids", note="adds `token_ids` and `versions` to each choice, and `prompt_token_ids`"),
    *acts("model", proxy="harmless", note="the proxy samples the policy, whatever the name"),
    *_SAMPLING,
    *acts("top_logprobs", note="log-probabilities are told with them"),
    *acts("response_format", note=_FORM),
    *acts("reasoning_effort", proxy="run", note=_EFFORT),
    *refused("verbosity", neutral=("medium",), note="ask for it in the prompt"),
    *_OPENAI_HARMLESS,
    *harmless("prediction", note="makes a vendor's answer faster"),
    *harmless("stream_options.include_obfuscation", note="nothing is padded here"),
    *refused("functions", neutral=([],), note="use `tools`"),
    *refused("function_call", neutral=("none", "auto"), note="use `tool_choice`"),
    *refused("modalities", neutral=(["text"], []), note="models here write text alone"),
    *refused("audio", note="models here write text alone"),
    *refused("web_search_options", note="nothing is built in here; offer a tool"),
    *_SHARED, *_CHAT_EXTRAS,
]

_COMPLETIONS = without_proxy([
    *acts("prompt", "model", "max_tokens", "n", "stop", "logprobs", "stream", "stream_options", "stream_options.include_usage",
          "return_token_ids"),
    *_SAMPLING,
    *acts("echo", note="with `logprobs`, the prompt's tokens have theirs"),
    *acts("prompt_logprobs", note="the prompt's log-probabilities, as vLLM tells them"),
    *acts("begun_tokens", service="refused", neutral=(0,),
          note="how many of the prompt's last tokens are the answer's own, of a request that was not finished"),
    *refused("best_of", neutral=(1,), note="ask for `n`, and choose"),
    *refused("suffix", neutral=("",), note="nothing is filled in before a given end"),
    *acts("response_format", note=_FORM),
    *acts("return_routed_experts", service="refused", neutral=(False,),
          note="adds `routed_experts` to each choice, the experts that each token used, of a mixture of experts"),
    *acts("return_supports", service="refused", neutral=(False,),
          note="adds `supports` to each choice, the tokens among which each was drawn, where something leaves tokens out"),
    *acts("encoding_format", note='"base64" packs numbers as arrays'),
    *harmless("user", "metadata", note=_VENDOR),
    *harmless("stream_options.include_obfuscation", note="nothing is padded here"),
    *refused("add_special_tokens", neutral=(True,), note="give token ids to decide on every token"),
    *refused("prompt_embeds", note="give token ids"),
    *_SHARED,
    *acts("include_stop_str_in_output", note="the text keeps the stop string at its end"),
])

_RESPONSES = [
    *acts("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "stream", "text", "stop"),
    *acts("include", note="`message.output_text.logprobs` acts; the rest names outputs of tools that are not built in here"),
    *acts("model", proxy="harmless", note="the proxy samples the policy, whatever the name"),
    *_SAMPLING,
    *acts("text.format", note=_FORM),
    *refused("text.verbosity", neutral=("medium",), note="ask for it in the prompt"),
    *acts("top_logprobs", note="log-probabilities are told with them"),
    *acts("reasoning"),
    *acts("reasoning.effort", proxy="run", note=_EFFORT),
    *harmless("reasoning.summary", "reasoning.generate_summary", "reasoning.mode", "reasoning.context",
              note="reasoning is told as it was written"),
    *_OPENAI_HARMLESS,
    *harmless("stream_options", "stream_options.include_obfuscation", note="nothing is padded here"),
    *harmless("access_programs", "background_options", note=_VENDOR),
    *harmless("truncation", note="a conversation that is too long is refused, never cut"),
    *harmless("max_tool_calls", note="counts calls of tools that are built in, of which there are none"),
    *refused("background", neutral=(False,), note="wait for the answer, or stream it"),
    *refused("previous_response_id", "conversation", note="answers are not stored; send all items of the conversation in `input`"),
    *refused("prompt", note="no prompts are stored here; write it into `instructions`"),
    *refused("context_management", neutral=([],), note="nothing is compacted here"),
    *refused("image", note="models here write text alone"),
    *refused("include_stop_str_in_output", neutral=(False,)),
    *[field for field in _SHARED if field.name not in ("length_penalty", "use_beam_search")],
]

_MESSAGES = [
    *acts("messages", "system", "max_tokens", "tools", "tool_choice", "stop_sequences", "stream"),
    *acts("model", proxy="harmless", note="the proxy samples the policy, whatever the name"),
    *[field for field in _SAMPLING if field.name != "seed"],
    *acts("thinking", proxy="run", note="its type counts where the chat template reads `enable_thinking`; the length of thoughts has no"
                                         " bound of its own"),
    *acts("output_config"),
    *acts("output_config.effort", proxy="run", note=_EFFORT),
    *acts("output_config.format", "output_format", note=_FORM),
    *harmless("metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id",
              "betas", "billing_policy", "fallback_credit_token", note=_VENDOR),
    *harmless("fallbacks", note="other models are never asked in place of this one"),
    *refused("mcp_servers", neutral=([],), note="nothing is called from here; offer tools"),
    *refused("container", note="nothing is run here"),
    *refused("context_management", "compaction", neutral=({},), note="nothing is compacted here"),
    *refused("thread", note="conversations are not stored; send all messages"),
    *[field for field in _SHARED if field.name in ("stop_token_ids", "ignore_eos", "scaled_logprobs")],
]


def _by_name(fields: list[Field]) -> Mapping[str, Field]:
    return {field.name: field for field in fields}


FIELDS: Mapping[Api, Mapping[str, Field]] = {
    "chat completions": _by_name(_CHAT), "completions": _by_name(_COMPLETIONS), "Responses": _by_name(_RESPONSES),
    "Messages": _by_name(_MESSAGES)}
"""The table: for each API, its fields by name."""


def check_fields(api: Api, surface: Surface, body: Mapping[str, Any]) -> None:
    """Refuse a body with a field that would not be honoured.

    Raises RefusedError if a field is unknown, or would change the answer and is not honoured; `param` is its name, e.g. "text.format".
    """
    table = FIELDS[api]
    for key, value in body.items():
        _check_field(table, api, surface, key, value)
        if isinstance(value, Mapping) and any(name.startswith(f"{key}.") for name in table):
            for inner, given in value.items():
                _check_field(table, api, surface, f"{key}.{inner}", given)


def _check_field(table: Mapping[str, Field], api: Api, surface: Surface, name: str, value: Any) -> None:
    field = table.get(name)
    if field is None:
        raise RefusedError(f"{name[:_MAX_SHOWN]} is no field of {api} that is known here; leave it out", param=name[:_MAX_SHOWN])
    if field.use(surface) == "refused" and value is not None and not any(_same(value, neutral) for neutral in field.neutral):
        shown = str(value)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
        note = f" ({field.note})" if field.note else ""
        raise RefusedError(f"{name} is not honoured {_PLACES[surface]}, got {shown}; leave it out{note}", param=name)


def _same(value: Any, neutral: Any) -> bool:
    """Whether two JSON values are equal; 0 and false are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
