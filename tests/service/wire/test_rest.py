"""Answers at once have the fields that the public client reads."""

from datetime import UTC, datetime

import msgspec

from offbeat.service.types import CheckpointInfo, LoraSpec, ModelInfo, Pending, SamplerInfo, SessionInfo
from offbeat.service.wire import rest

RUN = "123e4567-e89b-42d3-a456-426614174000:train:0"
LORA = LoraSpec(rank=8, alpha=32.0, seed=1)
MODEL = ModelInfo(RUN, "alice", "base", LORA, 1.5, {"k": "v"})
CHECKPOINT = CheckpointInfo(RUN, "sampler", "a", 10.0, 99, False, 20.0, {})
TIME = "1970-01-01T00:00:10+00:00"


def test_times_are_read_back_by_the_standard_library() -> None:
    assert datetime.fromisoformat(rest.time_text(1.25)) == datetime.fromtimestamp(1.25, UTC)


def test_a_future_that_has_not_ended_says_why_if_there_is_a_reason() -> None:
    assert rest.pending("r", Pending()) == {"type": "try_again", "request_id": "r", "queue_state": "active"}
    assert rest.pending("r", Pending("paused_capacity", "full"))["queue_state_reason"] == "full"


def test_every_sample_has_an_id() -> None:
    assert rest.sample_accepted("r", num_samples=2) == {"request_id": "r", "sample_sequence_ids": ["r:0", "r:1"]}


def test_a_model_names_its_base_and_tokenizer() -> None:
    assert rest.model_info(MODEL, tokenizer_id="folder") == {
        "type": "get_info", "model_id": RUN, "model_name": "base", "is_lora": True, "lora_rank": 8,
        "model_data": {"model_name": "base", "tokenizer_id": "folder"}}
    assert rest.capabilities({"base": 64, "alias": 64}, {"teacher": 128})["supported_models"] == [
        {"model_name": "base", "max_context_length": 64, "trainable": True, "sampleable": True},
        {"model_name": "alias", "max_context_length": 64, "trainable": True, "sampleable": True},
        {"model_name": "teacher", "max_context_length": 128, "trainable": False, "sampleable": True}]


def test_a_checkpoint_has_its_path() -> None:
    assert rest.checkpoint(CHECKPOINT) == {
        "checkpoint_id": "sampler_weights/a", "checkpoint_type": "sampler", "time": TIME,
        "tinker_path": f"tinker://{RUN}/sampler_weights/a", "size_bytes": 99, "public": False, "user_metadata": {},
        "expires_at": "1970-01-01T00:00:20+00:00"}


def test_a_run_has_its_last_checkpoints() -> None:
    run = rest.training_run(MODEL, last_sampler_checkpoint=CHECKPOINT)
    assert (run["training_run_id"], run["model_owner"], run["lora_rank"], run["corrupted"]) == (RUN, "alice", 8, False)
    assert run["last_checkpoint"] is None and run["last_sampler_checkpoint"]["size_bytes"] == 99 and run["user_metadata"] == {"k": "v"}


def test_pages_say_where_they_are() -> None:
    cursor = {"offset": 2, "limit": 1, "total_count": 9}
    assert rest.training_runs([rest.training_run(MODEL)], limit=1, offset=2, total=9)["cursor"] == cursor
    page = rest.checkpoints([CHECKPOINT], limit=1, offset=2, total=9)
    assert page["cursor"] == cursor and len(page["checkpoints"]) == 1


def test_the_rest_is_json_too() -> None:
    answers = [
        rest.weights_info("base", LORA), rest.external_weights_urls({"a.json": "http://x"}, expires=10.0),
        rest.archive_url("http://y", expires=10.0), rest.sampler(SamplerInfo("s", "base", None)),
        rest.session(SessionInfo("s", (RUN,), ("x",), {"k": "v"}, ""))]
    assert msgspec.json.decode(msgspec.json.encode(answers)) == [
        {"base_model": "base", "is_lora": True, "lora_rank": 8, "train_unembed": False, "train_mlp": True, "train_attn": True},
        {"urls": {"a.json": "http://x"}, "expires": TIME}, {"url": "http://y", "expires": TIME},
        {"sampler_id": "s", "base_model": "base", "model_path": None},
        {"training_run_ids": [RUN], "sampler_ids": ["x"], "user_metadata": {"k": "v"}, "display_name": None}]
