"""`offbeat serve`: a Tinker-compatible service, where many clients train adapters of one base model and sample from them."""

import argparse
from collections.abc import Iterator, Sequence

from offbeat.cli.common import keep_private
from offbeat.config.load import Override, load_config
from offbeat.loading import load_module

DESCRIPTION = """\
Serve one base model to many clients of the public `tinker` SDK: each trains LoRA adapters of its own and samples from them, and all share
the same trainers and engines. Models, checkpoints and results are kept in the data folder and survive a restart.

The server answers this machine only. To let others in, give it an address and a file of keys:

  [owners.alice]
  key = "tml-3f9c2e7b51d84a06"         # at least 16 random characters; what alice sets as TINKER_API_KEY
  max_models = 8                       # optional limits, such as max_queued_tokens and max_disk_bytes

Without the file, any key that begins with tml- is accepted, and each key is an owner of its own. The status page is at /, metrics are at
/metrics. Ctrl-C ends the server and saves every model; a second Ctrl-C ends it at once. Any setting can be given as well, such as
--inference.engine vllm or --serve.session_timeout_s 3600; `offbeat config docs` lists them.
"""

EXAMPLES = """\
examples:
  offbeat serve --model runs/quickstart/export --model-name mine/sorter
  offbeat serve --model /models/Qwen3-0.6B --model-name Qwen/Qwen3-0.6B --num-engines 4 --num-ranks 4 --train.devices_per_rank 1
  offbeat serve --model /models/Qwen3-0.6B --inference.engine vllm --inference.python .venv-vllm/bin/python
  offbeat serve --model /models/Qwen3-0.6B --host 0.0.0.0 --keys keys.toml --database postgresql://offbeat@db/offbeat

then, where the client runs (pip install tinker):
  export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-mine
  python -c "import tinker; print(tinker.ServiceClient().create_lora_training_client('mine/sorter', rank=8).result().get_info())"
"""

# Defaults that the service needs and a run does not; the command line takes precedence.
_DEFAULTS: Sequence[Override] = (("model.lora.rank", "32"), ("inference.request_timeout_s", "3600"), ("train.step_timeout_s", "300"))
_SETTINGS = {
    "model": "model.path", "model_name": "serve.model_name", "host": "serve.host", "port": "serve.port", "data_dir": "serve.data_dir",
    "database": "serve.database", "keys": "serve.keys", "num_engines": "inference.num_engines", "num_ranks": "train.num_ranks",
    "max_lora_rank": "model.lora.rank", "lora_alpha": "model.lora.alpha", "public_status": "serve.public_status",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="PATH", help="folder or hub id of the base model, its tokenizer included")
    parser.add_argument(
        "--model-name", metavar="NAME", help="what clients call it and load its tokenizer by, such as org/model (default: the folder's)")
    parser.add_argument("--host", help="address to listen on; one that other machines can reach needs --keys (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 chooses a free one (default: 8000)")
    parser.add_argument("--data-dir", metavar="DIR", help="folder for models, checkpoints and results (default: offbeat-data)")
    parser.add_argument(
        "--database", metavar="URL",
        help="postgresql://USER@HOST/NAME, with the password in $PGPASSWORD (default: SQLite in the data folder)")
    parser.add_argument("--keys", metavar="FILE", help="TOML file with owners and their API keys (default: any key)")
    parser.add_argument("--num-engines", type=int, metavar="N", help="engines that sample (default: 1)")
    parser.add_argument("--num-ranks", type=int, metavar="N", help="processes that train (default: 1)")
    parser.add_argument("--max-lora-rank", type=int, metavar="R", help="largest rank of an adapter (default: 32)")
    parser.add_argument("--lora-alpha", type=float, metavar="A", help="an adapter's output is scaled by A / its rank (default: 32)")
    parser.add_argument(
        "--public-status", action="store_true", default=None,
        help="show the status page and /metrics to other machines; a proxy on this one makes them public, too, if it neither passes on "
        "its own name as Host nor sends X-Forwarded-For")


def run(args: argparse.Namespace, overrides: Sequence[Override]) -> int:
    """Serve until interrupted; raises a UserError if an argument or setting cannot work."""
    config = load_config(None, [*_DEFAULTS, *_given(args), *overrides])
    keep_private(config)
    run_service = load_module("offbeat.service.serve").run_service  # not at the top: help and wrong settings need none of it
    run_service(config, say=lambda text: print(text, flush=True), debug=args.debug)
    return 0


def _given(args: argparse.Namespace) -> Iterator[Override]:
    for name, key in _SETTINGS.items():
        value = getattr(args, name)
        if value is not None:
            yield key, str(value).lower() if isinstance(value, bool) else str(value)
    if (args.max_lora_rank or 0) > 64:
        yield "inference.max_adapter_rank", str(args.max_lora_rank)
