"""The embedded engine of an older commit as a contestant of `prefixes.py`, in this process, in float32; PYTHONPATH leads to its sources.

usage: engine_before.py MODEL

It has no prefix cache, and so nothing to forget.
"""

import sys
import time
from typing import Any

from measure import answer_jobs, claim_stdout

from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import SamplingParams


def main(model: str) -> None:
    """Sample `n` answers of `length` tokens to each prompt of a job."""
    pipe = claim_stdout()
    engine = load_engine(EngineOptions(model=model, max_running=256))

    def run(job: dict[str, Any]) -> dict[str, Any]:
        if job["do"] == "forget":
            return {}
        params = SamplingParams(max_new_tokens=job["length"], ignore_eos=True, seed=0)
        start = time.perf_counter()
        samples = [[output.token_ids for output in outputs] for outputs in engine.generate(job["prompts"], params, n=job["n"])]
        return {"wall_s": time.perf_counter() - start, "samples": samples}

    answer_jobs(pipe, run)


if __name__ == "__main__":
    main(*sys.argv[1:])
