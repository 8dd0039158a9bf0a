"""Request bodies of the engine's HTTP endpoints, checked by msgspec, and their translation to requests. Used by `server`.

Bodies follow OpenAI's and vLLM's; `chat.fields` describes each field of a completion or a chat.
"""

from typing import Literal, cast

import msgspec

from offbeat.chat.dialects import read_fields
from offbeat.chat.fields import Surface
from offbeat.chat.messages import ChatRequest
from offbeat.chat.shaping import ShapingFields, StructuredOutputs
from offbeat.engine.request import SamplingParams
from offbeat.errors import RefusedError
from offbeat.weights.protocol import Interrupt


class StreamOptions(msgspec.Struct):
    """Parts of a stream besides its text."""

    include_usage: bool | None = None


class GenerateBody(ShapingFields, kw_only=True):
    """Fields that completions and chats share.

    Attributes:
        model: the name of a loaded adapter or of the base model; None is the base model.
        max_tokens: None uses the endpoint's default: 16 for completions, the rest of the context for chats.
        logprobs: anything but null or false returns the log-probability of each sampled token.
        scaled_logprobs: report log-probabilities over all tokens at the temperature, as if nothing else changed the distribution.
        include_stop_str_in_output: keep the stop string at the end of the text.
        return_token_ids: return token ids, and with them the weight version of each token.
        return_routed_experts: return the experts that each token used, as base64 of `offbeat.data.expert_routes.pack_routes`.
        return_supports: return the tokens among which each was drawn, as base64 of `offbeat.data.sample_supports.pack_supports`.
        encoding_format: "base64" gives token ids, versions and log-probabilities as base64 of little-endian int32 and float32.
    """

    model: str | None = None
    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | bool | None = None
    top_logprobs: int | None = None
    scaled_logprobs: bool = False
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool = False
    return_routed_experts: bool = False
    return_supports: bool = False
    encoding_format: Literal["float", "base64"] = "float"

    def params(self, *, default_max_tokens: int) -> SamplingParams:
        """Translate the body to sampling parameters. Raises RefusedError if a value is out of range."""
        return SamplingParams(
            max_new_tokens=default_max_tokens if self.max_tokens is None else self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),  # vLLM writes -1 for no limit
            seed=self.seed,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            scaled_logprobs=self.scaled_logprobs,
            top_logprobs=self.num_top,
            routes=self.return_routed_experts,
            supports=self.return_supports,
            shaping=self.shaping(),
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_top(self) -> int:
        """Number of most likely tokens to report at each position."""
        return self.top_logprobs or 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False


class CompletionBody(GenerateBody, kw_only=True):
    """Body of POST /v1/completions; an integer in `logprobs` requests that many most likely tokens at each position.

    Attributes:
        prompt: one prompt or a list of them, each a string or a list of token ids.
        echo: put the prompt before each answer; with `logprobs`, its log-probabilities too. `max_tokens` may then be 0.
        prompt_logprobs: report the log-probabilities of the prompt's tokens, and of this number of most likely tokens in their places.
        request_id: name of the request for POST /v1/running, which no other running request may have.
        begun_tokens: how many of the prompt's last tokens are the sample's own, of a request that was not finished. The sample goes on as
            it would have, and the text is all of it; tokens, log-probabilities and versions are those that follow.
    """

    prompt: str | list[int | str | list[int]]
    echo: bool = False
    prompt_logprobs: int | None = None
    request_id: str | None = None
    begun_tokens: int = 0

    @property
    def prompt_top(self) -> int | None:
        """Number of likeliest tokens to report in place of each of the prompt's; None if none of its log-probabilities is wanted."""
        echoed = self.num_top if self.echo and self.wants_logprobs else None
        wanted = [num for num in (echoed, self.prompt_logprobs) if num is not None]
        return max(wanted) if wanted else None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, in order. Raises RefusedError if a list mixes token ids with prompts."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        kinds = set(map(type, given))
        if kinds <= {int}:
            return [cast("list[int]", given)]  # also the empty prompt, which the engine refuses
        if int in kinds:
            raise RefusedError("prompt mixes token ids with prompts; give one prompt or a list of prompts")
        return cast("list[str | list[int]]", given)

    @property
    def num_top(self) -> int:
        return int(self.logprobs or 0) if self.logprobs is not True else 0


def body_of(request: ChatRequest, *, stops: tuple[str, ...], stop_token_ids: list[int], stream: bool) -> GenerateBody:
    """Write a chat's settings as a completion's."""
    shaping = request.shaping.fields()
    structured = shaping.pop("structured_outputs", None)
    return GenerateBody(
        **shaping, structured_outputs=structured and StructuredOutputs(**structured),
        model=request.model, max_tokens=request.max_new_tokens, n=request.n, temperature=request.temperature, top_p=request.top_p,
        top_k=request.top_k, seed=request.seed, stop=list(stops), stop_token_ids=stop_token_ids, ignore_eos=request.ignore_eos,
        stream=stream, stream_options=StreamOptions(request.include_usage), logprobs=request.logprobs or None,
        top_logprobs=request.top_logprobs, scaled_logprobs=request.scaled_logprobs, return_token_ids=request.return_token_ids)


class RunningBody(msgspec.Struct):
    """Body of POST /v1/running: how many tokens of each sample the client has, by the requests' names."""

    requests: dict[str, list[int]]


class StageBody(msgspec.Struct):
    """Body of POST /v1/weights/stage. With `broadcast`, the `host:port` where the version is offered, the folder need not exist.

    Staging the same version, folder and fingerprint again changes nothing.
    """

    version: int
    folder: str
    broadcast: str = ""
    fingerprint: str = ""


class SwitchBody(msgspec.Struct):
    """Body of POST /v1/weights/switch."""

    version: int
    interrupt: Interrupt = "recompute"


class ProveBody(msgspec.Struct):
    """Body of POST /v1/weights/prove: the tokens to score under the weights in use, or under the adapter of that name."""

    tokens: list[int]
    adapter: str = ""


class ScoreBody(msgspec.Struct):
    """Body of POST /v1/score, by the base model or by an adapter; fields as in `ScoreJob`."""

    tokens: list[int]
    adapter: str = ""
    top_k: int = 0
    targets: list[list[int]] | None = None
    draws: int = 0
    temperature: float = 1.0
    seed: int = 0
    urgent: bool = False


class LoadAdapterBody(msgspec.Struct):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(msgspec.Struct):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str


class PauseBody(msgspec.Struct):
    """Body of POST /pause; `by` names who pauses, for others to see."""

    mode: Literal["keep", "abort"] = "keep"
    by: str = ""


class SleepBody(msgspec.Struct):
    """Body of POST /v1/weights/sleep: whether to keep the weights in host memory, for POST /v1/weights/wake."""

    keep_weights: bool = False


def read_completion(data: bytes, *, surface: Surface = "engine") -> CompletionBody:
    """Decode and check the body of a completion to this server. Errors as of `dialects.read_fields`."""
    try:
        return read_fields(CompletionBody, data, api="completions", surface=surface)
    except RefusedError as exc:
        if not exc.param.startswith("prompt"):
            raise
        raise RefusedError(f"{exc}; prompt takes a string, a list of token ids, or a list of such prompts", param=exc.param) from exc
