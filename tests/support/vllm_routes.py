"""The experts that vLLM's routers choose for some tokens on a CPU, and the tokens' log-probabilities, as vLLM's servers send both.

    .venv-vllm/bin/python tests/support/vllm_routes.py MODEL "[5, 6, 7]"

Runs in vLLM's environment. On CPUs vLLM refuses `--enable-return-routed-experts`, of which this uses the parts that need no accelerator:
what notes the experts in a forward pass, and what encodes them. Prints one line of JSON.
"""

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.completion import serving
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, bind_routed_experts_capturer


def main(model: str, tokens: list[int]) -> None:
    llm = LLM(model, dtype="float32", kv_cache_memory_bytes=64 << 20, enforce_eager=True)

    def bind(worker: Any) -> RoutedExpertsCapturer:
        capturer = RoutedExpertsCapturer(64, worker.vllm_config)
        bind_routed_experts_capturer(worker.model_runner.get_model(), capturer)
        return capturer

    (capturer,) = llm.collective_rpc(bind)
    (answer,) = llm.generate({"prompt_token_ids": tokens}, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    routes = capturer.snapshot_routing_data(len(tokens)).numpy()
    logprobs = [row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)]
    print(json.dumps({"routed_experts": serving.numpy2base64(routes), "logprobs": logprobs}))


main(sys.argv[1], json.loads(sys.argv[2]))
