"""A real pretrained model, SmolLM2-135M-Instruct, from `make smollm2`: what it answers, in both number formats, and that a run takes it.

These are the tests of `make test-real`; elsewhere they are skipped where the model is not there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contract import embedded
from offbeat.data.tokenizer import load_tokenizer
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import Sampling

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".models" / "smollm2-135m-instruct"

pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason="make smollm2 makes the model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_answers_a_question_in_either_number_format(dtype: str) -> None:
    tokenizer = load_tokenizer(MODEL)
    prompt = tuple(tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}]))

    async def ask(client: EngineClient) -> str:
        sampling = Sampling(24, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,))
        (sample,) = await client.generate(prompt, sampling, n=1, timeout_s=100)
        return sample.text

    with embedded(str(MODEL), dtype=dtype, max_context=128) as engine:
        assert "Paris" in engine.run(ask)


@pytest.mark.parametrize("changes", [("model.dtype", "bfloat16"), ("model.lora.rank", "8")], ids=["whole weights in bfloat16", "adapter"])
def test_steps_of_the_example_train_and_publish_it(changes: tuple[str, str], tmp_path: Path) -> None:
    overrides = {
        "run.dir": tmp_path, "run.total_steps": 2, "rollout.consumer_batch_size": 2, "rollout.group_size": 4, "evaluate.num_prompts": 4,
        "rollout.max_concurrent_rollouts": 4, "checkpoint.export": "false", changes[0]: changes[1]}
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "train", "examples/smollm2_arithmetic.toml", "--json",
         *(word for key, value in overrides.items() for word in (f"--{key}", str(value)))],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "smollm2_arithmetic" / "result.json").read_text())
    assert result["steps"] == 2
    events = [json.loads(line) for line in (tmp_path / "smollm2_arithmetic" / "events.jsonl").read_text().splitlines()]
    assert not [event for event in events if event["kind"] in ("quarantined", "engine_failed", "rejected")]
    assert result["max_logprob_gap"] < 0.1
