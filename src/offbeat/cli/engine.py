"""`offbeat engine`: serves a model over an OpenAI-compatible HTTP API with the embedded engine."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from offbeat.cli.keys import read_key
from offbeat.cpu import this_cpu
from offbeat.data.image_reader import processor_files, reads_images
from offbeat.data.model_folder import check_model_folder, read_model_config
from offbeat.data.tokenizer import load_tokenizer
from offbeat.engine.options import EngineOptions
from offbeat.errors import ConfigError
from offbeat.extras import missing_modules
from offbeat.fleet.engine_group import raise_death, serve_one
from offbeat.hosts import is_loopback
from offbeat.listening import bind
from offbeat.runs.number_format import engine_format, slow_dtype
from offbeat.runs.threads import usable_cores

DESCRIPTION = """\
Serve a Hugging Face causal language model: /v1/completions and /v1/chat/completions with streaming, token ids, log-probabilities and weight
versions, chats with tools also as /v1/responses and /v1/messages, continuous batching, /health and Prometheus /metrics. Runs until Ctrl-C.

Without a key it answers programs of this machine only. A key in $OFFBEAT_API_KEY or a file is required in every request.

Chats with images are answered if the model reads them (`offbeat docs images`).

Log-probabilities are those of the distribution that was sampled: after temperature, top-k and top-p; at temperature 0, of temperature 1.
"""

EXAMPLES = """\
examples:
  offbeat engine --model runs/quickstart/export --port 8001
  curl -s localhost:8001/v1/completions -H 'content-type: application/json' -d '{"prompt": "31752046>", "max_tokens": 10, "temperature": 0}'
"""


_MOST_STORED_BYTES = 8 << 30
"""Bytes of processed images that chats may leave on disk while the engine runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="PATH", help="folder or hub id of the model, its tokenizer included")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; one that other machines can reach needs a key")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on; 0 chooses a free one (default: 8001)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="float32",
        help="number format; auto takes bfloat16 where the device or the CPU has instructions for it (default: float32)")
    parser.add_argument(
        "--quantization", choices=("none", "int8"), default="none",
        help="int8 computes with weights and their inputs rounded to 8 bits, on CPUs and by the fast path alone (default: none)")
    parser.add_argument("--forward", choices=("auto", "direct", "hf"), default="auto", help="own fast path, or Hugging Face's modules")
    parser.add_argument("--max-running", type=int, default=256, help="samples decoded together (default: 256)")
    parser.add_argument("--max-queued", type=int, default=4096, help="requests waiting before the answer is 429 (default: 4096)")
    parser.add_argument("--max-context", type=int, default=0, help="longest prompt plus answer in tokens (default: the model's)")
    parser.add_argument(
        "--max-cache-bytes", type=int, default=0,
        help="bytes of the cache of keys and values; a request waits until its longest answer fits (default: a quarter of the machine's "
        "memory, or half of what is free on an accelerator)")
    parser.add_argument(
        "--no-prefix-caching", dest="prefix_caching", action="store_false",
        help="compute every prompt as a whole, instead of keeping what was computed of earlier prompts and answers")
    parser.add_argument(
        "--batch-invariant", action="store_true",
        help="compute each token to the same bits whatever else is in its batch (float32, on CPUs)")
    parser.add_argument(
        "--max-prefill-per-round", type=int, default=512,
        help="prompt tokens computed in a round beside samples that decode; a longer prompt takes several rounds (default: 512)")
    parser.add_argument("--max-adapters", type=int, default=32, help="LoRA adapters held at once (default: 32)")
    parser.add_argument("--max-adapter-rank", type=int, default=64, help="largest rank of an adapter (default: 64)")
    parser.add_argument(
        "--stall-timeout-s", type=float, default=60.0,
        help="seconds for which a step may compute nothing before /health says that the engine is slow or hung; a step that computes may "
        "take five times as long (default: 60)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: one for each core that it may use)")
    parser.add_argument("--device", type=int, default=None, help="accelerator to use, by number (default: the CPU)")
    parser.add_argument(
        "--images", metavar="FOLDER", help="folder that paths of images in chats may lead to (default: images come as data URIs alone)")
    parser.add_argument("--key-file", metavar="FILE", help="file with the required bearer token (default: $OFFBEAT_API_KEY)")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Serve until interrupted.

    Raises ModelError if there is no model or tokenizer, PortBusyError if the port is taken, ConfigError if an option is invalid or others
    could reach the engine without a key.
    """
    if overrides:
        raise ConfigError(f"--{overrides[0][0]} is not an option of offbeat engine; see offbeat engine --help")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {args.port}")
    if args.threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {args.threads}")
    key = read_key(args.key_file)
    if not key and not is_loopback(args.host):
        raise ConfigError(
            f"--host {args.host} can be reached by other machines, so this engine needs a key: set OFFBEAT_API_KEY or give --key-file, or "
            "listen on 127.0.0.1")
    bind(args.host, args.port, who="the engine").close()  # a taken port is found before a process has loaded its libraries
    model = check_model_folder(args.model)
    load_tokenizer(model)
    dtype = engine_format(args.dtype, device=args.device)
    if args.device is None and (advice := slow_dtype(dtype, cpu=this_cpu())):
        print(advice, file=sys.stderr)
    options = EngineOptions(
        model=str(model), dtype=dtype, quantization=args.quantization, forward=args.forward, max_running=args.max_running,
        max_queued=args.max_queued, max_context=args.max_context, max_cache_bytes=args.max_cache_bytes, prefix_caching=args.prefix_caching,
        batch_invariant=args.batch_invariant, max_prefill_per_round=args.max_prefill_per_round, max_adapters=args.max_adapters,
        max_adapter_rank=args.max_adapter_rank, stall_timeout_s=args.stall_timeout_s, api_key=key, version=-1)
    with TemporaryDirectory(prefix="offbeat-images-") as store:
        asyncio.run(_serve(args, _with_images(options, store, args.images)))
    return 0


def _with_images(options: EngineOptions, store: str, files: str | None) -> EngineOptions:
    """Return the options with a folder for the images of chats, if the model reads images; raises ConfigError if `files` cannot be used."""
    reads = reads_images(read_model_config(options.model)) and bool(processor_files(options.model))
    if files is not None and not reads:
        raise ConfigError(f"--images is for a model that reads images, and {options.model} is none with a processor; leave it out")
    if files is not None and not Path(files).is_dir():
        raise ConfigError(f"--images must name a folder, got {files!r}; give the one that paths of images lead to")
    if not reads or missing_modules(["PIL"]):
        return options
    return replace(options, images=store, max_stored_bytes=_MOST_STORED_BYTES, image_files=str(Path(files).resolve()) if files else "")


async def _serve(args: argparse.Namespace, options: EngineOptions) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with serve_one(options, host=args.host, port=args.port, threads=args.threads, device=args.device) as (url, worker):
        print(f"serving {options.model} at {url}; Ctrl-C ends it", flush=True)
        while worker.alive and not stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), timeout=0.5)
        if not stop.is_set():
            await raise_death(worker)
