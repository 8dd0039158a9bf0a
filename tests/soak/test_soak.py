"""The soak's own judgement, and with OFFBEAT_TEST_SOAK=1 a short soak of real ranks and engines."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from contract import CANARY, build_adapter, build_model
from offbeat.errors import ModelError
from offbeat.inference.sampling import Sample
from offbeat.model.peft_io import read_adapter
from offbeat.telemetry.console import Console
from soak.ledger import Expected, Fault, Ledger
from soak.reference import Reference
from soak.report import document, table
from soak.run import soak
from soak.saboteur import change_rank, cut_off, flip_bytes, remove_file


def expected(*token_ids: int, logprob: float = -1.0) -> Expected:
    return Expected(token_ids, (logprob,) * len(token_ids), np.full(4, logprob), logprob)


def sample(*token_ids: int, version: int, logprob: float = -1.0) -> Sample:
    return Sample(token_ids, (logprob,) * len(token_ids), (version,) * len(token_ids), "", "stop")


def test_a_wrong_version_and_another_tenants_answer_are_told_apart() -> None:
    ledger = Ledger({"alice@1": expected(7, 8), "alice@2": expected(7, 9), "bob@1": expected(5, 6)})
    ledger.check_sample("alice", sample(7, 9, version=2), oldest=1, newest=2)
    ledger.check_sample("alice", sample(7, 9, 3, version=2), oldest=2, newest=2)  # beyond what is certain
    assert not ledger.wrong_versions + ledger.cross_tenant and ledger.num_tokens == 4
    ledger.check_sample("alice", sample(7, 8, version=1), oldest=2, newest=2)
    ledger.check_sample("alice", sample(7, 8, version=3), oldest=2, newest=3)
    ledger.check_sample("alice", sample(7, 8, version=2), oldest=2, newest=2)
    ledger.check_sample("alice", replace(sample(7, 9, version=2), token_versions=(1, 2)), oldest=1, newest=2)
    assert [text.partition(":")[2] for text in ledger.wrong_versions] == [
        "", "", " tokens (7, 8) instead of (7, 9); it is what alice@1 answers", ""]
    ledger.check_sample("alice", sample(5, 6, version=2), oldest=2, newest=2)
    ledger.check_sample("alice", sample(7, 9, version=2, logprob=-1.01), oldest=2, newest=2)
    ledger.check_canary("bob@1", -1.001)
    ledger.check_unchanged("bob@1", False)
    assert len(ledger.cross_tenant) == 4 and "bob@1" in ledger.cross_tenant[0] and "no version" in ledger.cross_tenant[1]
    assert len(ledger.wrong_versions) == 4 and not ledger.result()["passed"]


def test_faults_are_timed_by_the_events_and_those_that_stay_are_told() -> None:
    ledger = Ledger({"alice@1": expected(7), "bob@1": expected(8, logprob=-2.0)})
    ledger.faults = [
        Fault("kill", "engine 0", 100.0), Fault("slow", "engine 1", 200.0), Fault("stop", "engine 1", 300.0),
        Fault("kill", "engine 1", 400.0), Fault("rank", "alice", 500.0, 0.1, 0.2, "is bad"), Fault("missing", "alice", 600.0)]
    ledger.judge_faults([
        {"kind": "quarantine", "engine": "engine 0", "time_s": 90.0, "reason": "before"},
        {"kind": "healed", "engine": "engine 0", "time_s": 95.0},
        {"kind": "quarantine", "engine": "engine 0", "time_s": 100.5, "reason": "gone"},
        {"kind": "publish", "adapter": "alice@1", "time_s": 102.0},
        {"kind": "healed", "engine": "engine 0", "time_s": 104.0},
        {"kind": "quarantine", "engine": "engine 1", "time_s": 303.0, "reason": "silent"},
        {"kind": "quarantine", "engine": "engine 0", "time_s": 500.1, "reason": "refuses alice's adapter"}])
    kill, slow, stop, *_ = ledger.faults
    assert (kill.noticed_s, kill.healed_s, kill.reason) == (0.5, 4.0, "gone")
    assert (slow.noticed_s, slow.healed_s) == (None, None)
    assert (stop.noticed_s, stop.healed_s) == (3.0, None)
    assert ledger.not_back == ["engine 1 after stop"]
    assert ledger.failures == ["kill of engine 1 was not noticed", "missing of alice was not noticed"]
    assert sorted(ledger.unhurt) == ["engine 0: before", "engine 0: refuses alice's adapter"]
    ledger.took("sample", 0.5)
    result = json.loads(json.dumps(ledger.result(seconds=1.0, tenants=2, engines=2, seed=0)))
    assert "NOT as promised" in table(result) and "Not all as promised." in document(result)
    assert result["smallest_difference"] == 1.0


def test_the_reference_is_what_peft_computes_and_every_damage_is_found(tmp_path: Path) -> None:
    model = build_model(tmp_path / "model", seed=0, tied=True)
    prompt = (13, 14, 15)
    folders = [Path(build_adapter(tmp_path / name, model, seed=seed)) for seed, name in enumerate(("flip", "cut", "rank", "missing"))]
    answers = [Reference(model, prompt=prompt, length=5, eos_token_id=-1).expect(folder, CANARY) for folder in folders]
    for folder, answer in zip(folders, answers, strict=True):
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder)).eval()
        with torch.inference_mode():
            tokens = peft.generate(input_ids=torch.tensor([prompt]), max_new_tokens=5, do_sample=False, eos_token_id=None)[0]
            table_ = peft(input_ids=tokens[None]).logits[0].log_softmax(-1)
        assert answer.token_ids == tuple(tokens[3:].tolist())
        assert answer.logprobs == pytest.approx(table_[2:-1].gather(1, tokens[3:, None]).squeeze(1).tolist(), abs=1e-4)
    assert len({answer.token_ids for answer in answers}) > 1
    before = read_adapter(folders[0]).fingerprint()
    flip_bytes(folders[0])
    assert read_adapter(folders[0]).fingerprint() != before  # it can be read: only the proof finds it
    for damage, folder in zip((cut_off, change_rank, remove_file), folders[1:], strict=True):
        damage(folder)
        with pytest.raises(ModelError):
            read_adapter(folder)


@pytest.mark.skipif(not os.environ.get("OFFBEAT_TEST_SOAK"), reason="takes half a minute; make soak is the long one")
def test_a_short_soak_is_as_promised(tmp_path: Path) -> None:
    kinds = ("kill", "corrupt", "rank", "missing")
    result = asyncio.run(soak(tmp_path, minutes=0, num_tenants=3, num_engines=2, seed=0, console=Console("quiet"), kinds=kinds))
    assert result["passed"], table(result)
    assert sorted(fault["kind"] for fault in result["faults"]) == sorted(kinds)
    assert result["operations"]["sample"]["count"] > 50
