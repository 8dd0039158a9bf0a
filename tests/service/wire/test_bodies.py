"""Bodies have the client's fields and defaults, and refuse what this server does not do."""

import json
from typing import Any

import msgspec
import pyrage
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.algorithms.adam import AdamParams
from offbeat.service.errors import BadRequestError
from offbeat.service.types import LoraSpec
from offbeat.service.wire import bodies
from offbeat.service.wire.bodies import (
    CopyWeightsBody,
    CreateModelBody,
    CreateSamplingSessionBody,
    CreateSessionBody,
    FinishSessionBody,
    LoadWeightsBody,
    OptimStepBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
    TtlBody,
)
from offbeat.service.wire.json_body import Body, metadata_of, read_json
from wire_golden import GOLDEN

MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"rank": 8}}
STEP = {"model_id": "m", "seq_id": 3}


def read(kind: type[Any], /, *parts: dict[str, Any], **fields: Any) -> Any:
    return read_json(kind, json.dumps({key: value for part in (*parts, fields) for key, value in part.items()}).encode())


def refused(kind: type[Any], /, *parts: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(BadRequestError) as caught:
        read(kind, *parts, **fields)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in GOLDEN["json_bodies"] if hasattr(bodies, name)])
def test_a_body_of_the_client_is_read_in_full(name: str) -> None:
    sent, unread = GOLDEN["json_bodies"][name], {"type", "sdk_version", "kind", "allow_metadata_only"}
    body = read(getattr(bodies, name), sent)
    assert sent.keys() - unread <= set(body.__struct_fields__)
    for field in sent.keys() - unread - {"user_metadata"}:
        value = msgspec.to_builtins(getattr(body, field))
        assert (list(value) if isinstance(value, tuple) else value) == sent[field] or sent[field].items() <= value.items()


def test_a_session_has_tags_and_metadata() -> None:
    body = read(CreateSessionBody, tags=["a"], user_metadata={"k": 1}, sdk_version="0.38.0", type="create_session", project_id=None)
    assert body.tags == ("a",) and metadata_of(body.user_metadata) == {"k": "1"} and body.display_name is None
    assert read(CreateSessionBody).tags == () and read(CreateSessionBody, tags=[""]).tags == ("",)
    assert refused(CreateSessionBody, tags=["a"] * 101).startswith("tags must be a list of length <= 100")
    assert read(CreateSessionBody, display_name="two\nlines é").display_name == "two\nlines é"
    assert refused(CreateSessionBody, display_name="a\0b").startswith("display_name must be a string matching")


def test_a_session_ends_for_a_reason() -> None:
    assert read(FinishSessionBody, reason={"type": "errored"}, detail="x").reason.type == "errored"


def test_a_model_has_an_adapter() -> None:
    body = read(CreateModelBody, MODEL, lora_config={"rank": 8, "seed": 5, "train_unembed": False}, optimizer_config={"type": "adamw"})
    assert body.lora(alpha=32.0) == LoraSpec(rank=8, alpha=32.0, seed=5, train_attn=True, train_mlp=True)


def test_a_seed_that_is_not_given_is_drawn() -> None:
    seeds = {read(CreateModelBody, MODEL).lora(alpha=1.0).seed for _ in range(4)}
    assert len(seeds) > 1 and all(0 <= seed < 2**31 for seed in seeds)


def test_models_that_this_server_cannot_train_are_refused() -> None:
    assert "no optimizer 'dimuon'; use adamw" in refused(CreateModelBody, MODEL, optimizer_config={"type": "dimuon", "version": 1})
    assert "lora_config is missing" in refused(CreateModelBody, {**MODEL, "lora_config": None})
    assert "lora_config.rank must be a whole number >= 1, got 0" in refused(CreateModelBody, MODEL, lora_config={"rank": 0})
    nothing = {"rank": 1, "train_attn": False, "train_mlp": False, "train_unembed": False}
    assert "lora_config trains nothing" in refused(CreateModelBody, MODEL, lora_config=nothing)


def test_a_step_has_the_protocols_defaults() -> None:
    expected = AdamParams(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, clip_norm=0.0)
    assert read(OptimStepBody, STEP, adam_params={}).params() == expected
    given = {"learning_rate": 1, "beta1": 0.5, "beta2": 0.6, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 2.0}
    assert read(OptimStepBody, STEP, adam_params=given).params() == AdamParams(
        lr=1, beta1=0.5, beta2=0.6, eps=1e-8, weight_decay=0.1, clip_norm=2.0)


def test_a_step_of_another_optimizer_or_out_of_range_is_refused() -> None:
    assert "adam_params is missing" in refused(OptimStepBody, STEP, optimizer_params={"type": "dimuon", "learning_rate": 1.0})
    assert "adam_params is wrong: beta1" in refused(OptimStepBody, STEP, adam_params={"beta1": 1.0})
    assert "adam_params is wrong: lr" in refused(OptimStepBody, STEP, adam_params={"learning_rate": -1})
    assert "seq_id must be a whole number" in refused(OptimStepBody, STEP, seq_id=2**31, adam_params={})


def test_weights_are_saved_for_an_hour_at_least() -> None:
    assert read(SaveWeightsBody, STEP).path is None
    assert read(SaveWeightsBody, STEP, path="a", ttl_seconds=3600, overwrite=True).ttl_seconds == 3600
    assert refused(SaveWeightsBody, STEP, ttl_seconds=60) == "ttl_seconds must be a whole number >= 3600, got 60"
    assert read(TtlBody, ttl_seconds=None).ttl_seconds is None
    assert refused(TtlBody) == "ttl_seconds is missing"


def test_weights_for_a_sampler_have_a_name_or_a_sampler() -> None:
    assert read(SaveForSamplerBody, STEP, path="a", kind="snapshot").path == "a"
    assert read(SaveForSamplerBody, STEP, sampling_session_seq_id=0, kind="inflight").sampling_session_seq_id == 0
    for fields in ({}, {"path": "a", "sampling_session_seq_id": 0}):
        assert "either path" in refused(SaveForSamplerBody, STEP, fields)


def test_exports_are_plain() -> None:
    assert read(SaveExternalBody, STEP, path="a", age_encryption_recipients=[]).path == "a"
    key = str(pyrage.x25519.Identity.generate().to_public())
    assert read(SaveExternalBody, STEP, path="a", age_encryption_recipients=[key] * 10).age_encryption_recipients == [key] * 10
    assert "10, got 11" in refused(SaveExternalBody, STEP, path="a", age_encryption_recipients=[key] * 11)
    for wrong in ("age1x", "", "ssh-ed25519 x", key.upper() + "x"):
        assert "is no recipient of age" in refused(SaveExternalBody, STEP, path="a", age_encryption_recipients=[key, wrong])


def test_weights_are_loaded_into_a_model_or_into_a_new_one() -> None:
    into, new = {"model_id": "m", "seq_id": 1}, {"session_id": "s", "model_seq_id": 0}
    load = {"path": "tinker://a", "optimizer": True}
    assert not read(LoadWeightsBody, load, into).creates
    assert read(LoadWeightsBody, load, new, base_model="b").creates
    for fields in ({}, {**into, **new}, {"model_id": "m"}, {"session_id": "s", "seq_id": 1}, {**into, "session_id": "s"}):
        assert "give either model_id and seq_id" in refused(LoadWeightsBody, load, fields)
    assert "let the owner publish" in refused(LoadWeightsBody, load, new, weights_access_token="t")
    assert "use adamw" in refused(LoadWeightsBody, load, new, optimizer_config={"type": "dimuon"})


def test_a_sampler_has_weights() -> None:
    sampler = {"session_id": "s", "sampling_session_seq_id": 1}
    assert read(CreateSamplingSessionBody, sampler, base_model="b").model_path is None
    assert "give base_model or model_path" in refused(CreateSamplingSessionBody, sampler)


def test_a_copy_belongs_to_a_session() -> None:
    assert read(CopyWeightsBody, source_path="p", session_id="s", model_seq_id=1).ttl_seconds is None
    assert "no projects" in refused(CopyWeightsBody, source_path="p", destination_project_id="x")


KINDS = [kind for kind in vars(bodies).values() if isinstance(kind, type) and issubclass(kind, Body)]
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text("ab", max_size=5), st.lists(st.text("ab"), max_size=2), st.just({}))


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_every_kind_refuses_in_words_what_it_does_not_take(kind: type[Body], data: st.DataObject) -> None:
    fields = dict.fromkeys(kind.__struct_fields__, VALUES)
    try:
        read(kind, data.draw(st.fixed_dictionaries({}, optional=fields)))
    except BadRequestError as exc:
        assert "`" not in str(exc) and "$" not in str(exc)
