"""What is said to vLLM and how its answers are read; `tests/engines` says it to a real one."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from offbeat.chat.shaping import Shaping
from offbeat.errors import BusyError, EngineError, RefusedError
from offbeat.inference.dialects.vllm import VllmDialect
from offbeat.inference.sampling import Draws, PromptScore, Sampling, ScoreRequest
from offbeat.weights.protocol import Manifest, Proof

MODELS = {"data": [{"id": "/models/small", "root": "/models/small"}, {"id": "alice@3", "root": "/a/3"}]}
FINE: dict[str, Any] = {
    "/health": {}, "/v1/models": MODELS, "/v1/weights/fingerprint": {"version": 4, "fingerprint": None},
    "/v1/load_lora_adapter": RefusedError("Both 'lora_name' and 'lora_path' must be provided."),
    "/v1/completions": {"choices": [{"logprobs": {"token_logprobs": [0.0]}}]}}


class Wire:
    """Gives the answers, or raises the errors, of a table by path, and keeps what it was asked."""

    name = "engine 0"

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.asked: list[Any] = []

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        self.asked.append((method, path, body))
        answer = self.answers[path]
        if isinstance(answer, Exception):
            raise answer
        return answer(body) if callable(answer) else answer

    async def fetch(self, path: str, body: Any, read: Callable[[bytes], Any]) -> Any:
        return read(msgspec.json.encode(await self.call("POST", path, body)))


def dialect(**changes: Any) -> VllmDialect:
    return VllmDialect(**{"model": "runs/small", "whole_weights": True, "lora": True} | changes)


def check(**changes: Any) -> None:
    answers = FINE | {path.replace("__", "/"): answer for path, answer in changes.items()}
    asyncio.run(dialect().check(Wire(answers)))


def test_a_server_that_can_do_all_that_is_needed_passes() -> None:
    check()


@pytest.mark.parametrize(("changes", "reason"), [
    ({"__v1__models": {"data": [{"id": "other"}]}}, "serves 'other' instead of 'runs/small'; start it on that model or under that"),
    ({"__v1__weights__fingerprint": RefusedError("Not Found")}, "cannot take new weights: it runs without --middleware vllm_inside.Inside"),
    ({"__v1__load_lora_adapter": RefusedError("Not Found")}, "cannot load adapters: it runs without --enable-lora"),
    ({"__v1__completions": {"choices": [{"logprobs": {"token_logprobs": [-1.3]}}]}}, "without --logprobs-mode processed_logprobs"),
])
def test_a_server_that_lacks_something_is_told_in_a_sentence(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError, match=f"engine 0 .*{reason}"):
        check(**changes)


def test_only_what_is_published_has_to_be_offered() -> None:
    answers = FINE | {"/v1/weights/fingerprint": RefusedError("Not Found"), "/v1/load_lora_adapter": RefusedError("Not Found")}
    asyncio.run(dialect(whole_weights=False, lora=False).check(Wire(answers)))


def test_adapters_on_cpus_take_the_worker_that_keeps_them_apart_from_other_requests() -> None:
    adapters = dialect(whole_weights=False, on_cpu=True)
    asyncio.run(adapters.check(Wire(FINE)))
    strange = Wire(FINE | {"/v1/weights/fingerprint": RefusedError("Not Found")})
    asyncio.run(dialect(whole_weights=False).check(strange))
    with pytest.raises(EngineError, match="engine 0 would mix adapters into requests without one, .* give inference.devices_per_engine"):
        asyncio.run(adapters.check(strange))


def test_tokens_of_a_server_without_our_endpoints_are_its_first_weights() -> None:
    choice = {"token_ids": [4, 5], "logprobs": {"token_logprobs": [-0.1, -0.2]}, "text": "ab", "finish_reason": "stop"}
    wire = Wire({"/v1/completions": {"choices": [choice]}})
    (sample,) = asyncio.run(dialect().generate(wire, (1,), Sampling(2), n=1, adapter=""))
    assert (sample.token_ids, sample.versions, sample.text, sample.finish_reason) == ((4, 5), (-1, -1), "ab", "stop")
    assert sample.logprobs == pytest.approx((-0.1, -0.2)) and "encoding_format" not in wire.asked[0][2]
    (sample,) = asyncio.run(dialect().generate(wire, (1,), Sampling(2), n=1, adapter="alice@3"))
    assert sample.versions == (3, 3)


def test_what_it_cannot_tell_is_refused_in_a_sentence() -> None:
    wire = Wire({})
    with pytest.raises(RefusedError, match="vLLM returns log-probabilities only of the distribution that it draws from"):
        asyncio.run(dialect().generate(wire, (1,), Sampling(2, top_k=3, scaled_logprobs=True), n=1, adapter=""))
    with pytest.raises(RefusedError, match="vLLM on CPUs with adapters cannot return log-probabilities of prompts, which would end it"):
        asyncio.run(dialect(on_cpu=True).score(wire, ScoreRequest((1, 2)), adapter=""))
    assert wire.asked == []


def test_samples_of_a_request_that_was_cut_have_the_seeds_that_follow() -> None:
    wire = Wire({"/v1/completions": {"choices": []}})
    asyncio.run(dialect().generate(wire, (1,), Sampling(1, seed=7, first_sample=32), n=3, adapter=""))
    assert [body["seed"] for _, _, body in wire.asked] == [39]


NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def test_a_request_names_all_that_the_models_own_sampling_defaults_would_change() -> None:
    wire = Wire({"/v1/completions": {"choices": [], "versions": [0]}})
    asyncio.run(dialect().generate(wire, (1,), Sampling(1), n=1, adapter=""))
    shaped = Sampling(1, top_p=0.5, top_k=9, shaping=Shaping(min_p=0.25, repetition_penalty=1.5))
    asyncio.run(dialect().generate(wire, (1,), shaped, n=1, adapter=""))
    plain, changed = (body for _, _, body in wire.asked)
    assert {name: plain[name] for name in NEUTRAL} == NEUTRAL
    assert {name: changed[name] for name in NEUTRAL} == NEUTRAL | {"top_p": 0.5, "top_k": 9, "min_p": 0.25, "repetition_penalty": 1.5}


def test_scores_and_proofs_name_them_too() -> None:
    rows = {"prompt_logprobs": [None, {"2": {"logprob": -3.0}}], "versions": [4]}
    proven = {"logprobs": {"top_logprobs": [{"token_id:2": -1.0}]}}
    wire = Wire({"/v1/completions": {"choices": [rows | proven]}})
    asyncio.run(dialect().score(wire, ScoreRequest((1, 2)), adapter=""))
    asyncio.run(dialect(whole_weights=False).prove(wire, (1, 2), adapter=""))
    assert len(wire.asked) == 2 and all(body | NEUTRAL == body for _, _, body in wire.asked)


def test_a_greedy_sample_is_asked_for_once() -> None:
    choice = {"token_ids": [4], "logprobs": {"token_logprobs": [-0.1]}, "text": "a", "finish_reason": "length"}
    wire = Wire({"/v1/completions": {"choices": [choice]}})
    assert len(asyncio.run(dialect().generate(wire, (1,), Sampling(1, temperature=0.0), n=3, adapter=""))) == 3
    assert [body["n"] for _, _, body in wire.asked] == [1]


def told(request: ScoreRequest, *, adapter: str = "") -> PromptScore:
    row = {"2": {"logprob": -3.0}, "8": {"logprob": -0.5}, "9": {"logprob": -1.0}}
    wire = Wire({"/v1/completions": {"choices": [{"prompt_logprobs": [None, row], "versions": [4]}]}})
    score = asyncio.run(dialect().score(wire, request, adapter=adapter))
    ((_, _, body),) = wire.asked
    assert (body["prompt"], body["max_tokens"], body["prompt_logprobs"]) == (request.tokens, 1, request.top_k)
    assert body.get("model", "") == adapter
    return score


def test_a_score_is_read_out_of_a_prompts_log_probabilities() -> None:
    score = told(ScoreRequest((1, 2), 2, ((), (9, 2))))
    assert (score.logprobs[1:], score.version) == ((-3.0,), 4)
    assert score.top == ((), ((8, -0.5), (9, -1.0))) and score.target_logprobs == ((), (-1.0, -3.0))
    assert told(ScoreRequest((1, 2)), adapter="alice@7").version == 7
    with pytest.raises(RefusedError, match="and token 7 is neither at position 1; use the embedded engine"):
        told(ScoreRequest((1, 2), 2, ((), (9, 7))))
    with pytest.raises(RefusedError, match="vLLM cannot draw alternatives to the tokens of a prompt"):
        told(ScoreRequest((1, 2), draws=Draws(1, 1.0, 0)))


def scored(body: Mapping[str, Any], *, version: int = 4) -> dict[str, Any]:
    """One token's log-probability: minus a tenth of it, minus one for every token before it."""
    (token,) = body["logprob_token_ids"]
    logprobs = {"top_logprobs": [{"token_id:99": -9.0, f"token_id:{token}": -token / 10 - len(body["prompt"])}]}
    return {"choices": [{"logprobs": logprobs, "versions": [version]}]}


def test_whole_weights_are_proven_by_the_endpoint_inside_and_the_canary_goes_with_the_switch() -> None:
    shown = {"version": 4, "fingerprint": "f", "logprobs": [-1.0, -2.0], "num_unread": 0}
    wire = Wire({"/v1/weights/switch": {}, "/v1/weights/prove": shown})
    asyncio.run(dialect().switch(wire, Manifest(4, "v4", "f", (7, 1, 2), ()), "drain"))
    assert wire.asked == [("POST", "/v1/weights/switch", {"version": 4, "interrupt": "drain", "canary": (7, 1, 2)})]
    assert asyncio.run(dialect().prove(wire, (7, 1, 2), adapter="")) == Proof(4, "f", (-1.0, -2.0))
    wire.answers["/v1/weights/prove"]["num_unread"] = 3
    assert not asyncio.run(dialect().prove(wire, (7, 1, 2), adapter="")).live
    wire.answers["/v1/weights/prove"] |= {"fingerprint": None, "num_unread": None}
    assert asyncio.run(dialect().prove(wire, (7, 1, 2), adapter="")) == Proof(4, None, (-1.0, -2.0), live=False)


@pytest.mark.parametrize("changes", [False, True])
def test_a_server_keeps_weights_where_the_next_ones_may_come_as_their_changes(changes: bool) -> None:
    wire = Wire({"/v1/weights/stage": {}})
    asyncio.run(dialect(changes=changes).stage(wire, Manifest(4, "v4", "f", (7, 1, 2), (), "host:1", base="v3")))
    body = {"version": 4, "folder": "v4", "broadcast": "host:1", "fingerprint": "f"}
    assert wire.asked == [("POST", "/v1/weights/stage", body | ({"keep": True} if changes else {}))]


def test_an_adapter_is_proven_one_token_at_a_time_and_ahead_of_others_where_the_server_hears_of_priorities() -> None:
    shown = {"fingerprint": "f", "priority": -1, "wrong": [], "num_unread": 2}
    wire = Wire({"/v1/completions": scored, "/v1/weights/adapter": shown})
    assert asyncio.run(dialect().prove(wire, (7, 1, 2), adapter="alice@3")) == Proof(3, "f", (-0.1 - 1, -0.2 - 2), live=False)
    bodies = [body for _, path, body in wire.asked if path == "/v1/completions"]
    assert [body["prompt"] for body in bodies] == [(7,), (7, 1)]
    assert all(body["max_tokens"] == 1 and "prompt_logprobs" not in body for body in bodies)
    assert all((body["model"], body["priority"]) == ("alice@3", -1) for body in bodies)
    bare = Wire({"/v1/completions": scored, "/v1/weights/adapter": RefusedError("Not Found")})
    assert asyncio.run(dialect().prove(bare, (7, 1, 2), adapter="alice@3")).fingerprint is None
    assert all("priority" not in body for _, path, body in bare.asked if path == "/v1/completions")


def test_an_adapter_that_could_be_compared_whole_is_proven_by_that_and_one_that_differs_is_refused() -> None:
    shown: dict[str, Any] = {"fingerprint": "f", "priority": 0, "wrong": [], "num_unread": 0}
    wire = Wire({"/v1/completions": scored, "/v1/weights/adapter": shown})
    assert asyncio.run(dialect().prove(wire, (7, 1, 2), adapter="alice@3")).live
    shown |= {"wrong": ["a.lora_A.weight", "a.lora_B.weight"]}
    with pytest.raises(RefusedError, match="it does not compute with what is in its folder: a.lora_A.weight and 1 other tensors differ"):
        asyncio.run(dialect().prove(wire, (7, 1, 2), adapter="alice@3"))


def test_the_base_of_adapters_is_proven_without_the_endpoint_inside() -> None:
    wire = Wire({"/v1/completions": scored})
    assert asyncio.run(dialect(whole_weights=False).prove(wire, (7, 1, 2), adapter="")) == Proof(4, None, (-0.1 - 1, -0.2 - 2))
    assert all("model" not in body for _, _, body in wire.asked)


def test_a_proof_in_which_the_version_changes_is_none() -> None:
    wire = Wire({"/v1/completions": lambda body: scored(body, version=len(body["prompt"]))})
    with pytest.raises(EngineError, match=r"engine 0 changed between versions \[1, 2\] during its proof"):
        asyncio.run(dialect(whole_weights=False).prove(wire, (7, 1, 2), adapter=""))


def test_a_server_that_gives_no_log_probability_is_told_to_be_newer() -> None:
    wire = Wire({"/v1/completions": {"choices": [{"logprobs": {"top_logprobs": [{"a": -1.0}]}}]}})
    with pytest.raises(EngineError, match="use vLLM 0.32 or later"):
        asyncio.run(dialect(whole_weights=False).prove(wire, (7, 1), adapter=""))


def test_an_adapter_is_loaded_under_a_new_name_and_never_in_place() -> None:
    wire = Wire({"/v1/load_lora_adapter": {}})
    asyncio.run(dialect().load_adapter(wire, "alice@3", "/a/3"))
    assert wire.asked == [("POST", "/v1/load_lora_adapter", {"lora_name": "alice@3", "lora_path": "/a/3"})]


@pytest.mark.parametrize(("folder", "refused"), [("/a/3", False), ("/a/4", True)])
def test_a_name_that_is_loaded_is_fine_with_the_same_folder_only(folder: str, refused: bool) -> None:
    wire = Wire(FINE | {"/v1/load_lora_adapter": RefusedError("The lora adapter 'alice@3' has already been loaded.")})
    load = dialect().load_adapter(wire, "alice@3", folder)
    if refused:
        with pytest.raises(RefusedError, match="already been loaded"):
            asyncio.run(load)
    else:
        asyncio.run(load)


def test_a_folder_that_the_worker_cannot_load_is_the_folders_fault_and_a_failing_server_is_its_own() -> None:
    for words, kind in (("500: Call to add_lora method failed: rank 64", RefusedError), ("500: dead", EngineError)):
        with pytest.raises(EngineError) as told:
            asyncio.run(dialect().load_adapter(Wire({"/v1/load_lora_adapter": EngineError(words)}), "bob@1", "/b"))
        assert type(told.value) is kind


def test_unloading_an_unknown_adapter_is_fine_and_a_refusal_for_a_known_one_is_not() -> None:
    wire = Wire(FINE | {"/v1/unload_lora_adapter": RefusedError("cannot be found")})
    asyncio.run(dialect().unload_adapter(wire, "bob@1"))
    with pytest.raises(RefusedError):
        asyncio.run(dialect().unload_adapter(wire, "alice@3"))


def test_health_tells_the_version_where_the_server_can() -> None:
    assert asyncio.run(dialect().health(Wire(FINE))) == {"version": 4, "paused": False}
    paused = FINE | {"/v1/weights/fingerprint": {"version": 4, "paused": True}}
    assert asyncio.run(dialect().health(Wire(paused))) == {"version": 4, "paused": True}
    assert asyncio.run(dialect().health(Wire(FINE | {"/v1/weights/fingerprint": RefusedError("Not Found")}))) == {}
    with pytest.raises(BusyError):
        asyncio.run(dialect().health(Wire(FINE | {"/health": BusyError("full")})))
