"""Tenants of `service.py`: SDK clients in threads that train, then sample; runs in the SDK's environment.

usage: service_clients.py URL
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import tinker
from measure import answer_jobs, claim_stdout
from tinker import types

LENGTH = 64
PROMPT, SAMPLED = 16, 48
RANK = 16
DEADLINE_S = 300


def main(url: str) -> None:
    """Answer jobs: `tenants` clients, each with `sequences` sequences in each of `steps` rounds."""
    os.environ["TINKER_TELEMETRY"] = "0"
    pipe = claim_stdout()
    tenants: list[tuple[tinker.ServiceClient, tinker.TrainingClient]] = []

    def run(job: dict[str, Any]) -> dict[str, float]:
        while len(tenants) < job["tenants"]:
            service = tinker.ServiceClient(base_url=url, api_key=f"tml-tenant-{len(tenants)}")
            tenants.append((service, service.create_lora_training_client(base_model="offbeat/tiny", rank=RANK)))
        chosen = [training for _, training in tenants[: job["tenants"]]]
        together = Barrier(len(chosen))
        with ThreadPoolExecutor(len(chosen)) as threads:
            start = time.perf_counter()
            trained = sum(threads.map(lambda pair: train(pair[1], together, job, pair[0]), enumerate(chosen)))
            middle = time.perf_counter()
            samplers = list(threads.map(lambda training: training.save_weights_and_get_sampling_client(), chosen))
            ready = time.perf_counter()
            sampled = sum(threads.map(lambda sampler: sample(sampler, job), samplers))
            end = time.perf_counter()
        return {
            "trained": trained, "sampled": sampled, "train_s": middle - start, "sample_s": end - ready, "wall_s": end - start}

    answer_jobs(pipe, run)


def train(client: tinker.TrainingClient, together: Barrier, job: dict[str, Any], number: int) -> int:
    """Pipelined steps, as the SDK's documentation recommends: the next is sent while one is computed."""
    rng = np.random.default_rng([job["seed"] + 1, number])
    together.wait()
    waiting = []
    for _ in range(job["steps"]):
        data = [datum(rng) for _ in range(job["sequences"])]
        waiting.append((client.forward_backward(data, "cross_entropy"), client.optim_step(types.AdamParams(learning_rate=1e-3))))
        if len(waiting) > 2:
            finish(*waiting.pop(0))
    for pair in waiting:
        finish(*pair)
    return job["steps"] * job["sequences"] * LENGTH


def finish(*futures: Any) -> None:
    for future in futures:
        future.result(DEADLINE_S)


def datum(rng: np.random.Generator) -> types.Datum:
    tokens = rng.integers(3, 49, LENGTH + 1)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs={
        "target_tokens": types.TensorData.from_numpy(tokens[1:]), "weights": types.TensorData.from_numpy(np.ones(LENGTH, np.float32))})


def sample(sampler: tinker.SamplingClient, job: dict[str, Any]) -> int:
    """Four samples of each prompt."""
    rng = np.random.default_rng(job["seed"] + 1)
    params = types.SamplingParams(max_tokens=SAMPLED, temperature=1.0, stop=[])
    futures = [
        sampler.sample(types.ModelInput.from_ints(rng.integers(3, 49, PROMPT).tolist()), 4, params)
        for _ in range(job["steps"] * job["sequences"] // 4)]
    return sum(len(sequence.tokens) for future in futures for sequence in future.result(DEADLINE_S).sequences)


if __name__ == "__main__":
    main(sys.argv[1])
