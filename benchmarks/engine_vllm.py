"""vLLM on CPU as a contestant of `engine.py` and `real.py`; runs in vLLM's own environment, with its own defaults for
compilation and, unless the environment says otherwise, threads.

usage: engine_vllm.py MODEL [DTYPE]
"""

import sys
import time
from typing import Any

from measure import answer_jobs, claim_stdout
from vllm import LLM, SamplingParams

KV_CACHE_BYTES = 512 * 2**20


def main(model: str, dtype: str = "float32") -> None:
    """Keep `in_flight` requests in the engine until all are done."""
    pipe = claim_stdout()
    llm = LLM(
        model=model, dtype=dtype, max_model_len=1024, max_num_seqs=256, kv_cache_memory_bytes=KV_CACHE_BYTES, skip_tokenizer_init=True)
    engine = llm.llm_engine

    def run(job: dict[str, Any]) -> dict[str, Any]:
        if job.get("do") == "generate":
            params = SamplingParams(
                temperature=1.0, max_tokens=job["length"], ignore_eos=True, logprobs=0, detokenize=False, n=job["n"])
            start = time.perf_counter()
            found = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False)
            wall_s = time.perf_counter() - start
            return {"wall_s": wall_s, "samples": [[list(sample.token_ids) for sample in each.outputs] for each in found]}
        if job.get("do") == "forget":
            llm.reset_prefix_cache()
            return {}
        waiting = list(enumerate(zip(job["prompts"], job["lengths"], strict=True)))
        waiting.reverse()
        running = tokens = 0
        start = time.perf_counter()
        while waiting or running:
            while waiting and running < job["in_flight"]:
                i, (prompt, length) = waiting.pop()
                params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
                engine.add_request(f"{start}-{i}", {"prompt_token_ids": prompt}, params)
                running += 1
            for output in engine.step():
                if output.finished:
                    tokens += len(output.outputs[0].logprobs)
                    running -= 1
        return {"wall_s": time.perf_counter() - start, "tokens": tokens}

    answer_jobs(pipe, run)


if __name__ == "__main__":
    main(*sys.argv[1:])
