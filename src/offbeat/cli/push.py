"""`offbeat push RUN_DIR OWNER/NAME`: sends a run's model to a Hugging Face hub, with a model card."""

import argparse
from pathlib import Path

from offbeat.api.push import Commit, Push, plan_push, send

DESCRIPTION = """\
Send the exported model of RUN_DIR to a Hugging Face hub as OWNER/NAME, in one commit, with a model card (README.md): base model, algorithm,
data, results of evaluations and how to use it. A README.md in the exported folder is sent instead. The card and the files name no folder
of this machine, except adapter_config.json, unless --base-model replaces it.

The repository is created if it does not exist: public, unless --private is given or the owner's settings on the hub say otherwise, as
with 'hf upload'. Token and address of the hub are those of all Hugging Face tools: $HF_TOKEN or 'hf auth login', and $HF_ENDPOINT.
"""

EXAMPLES = """\
examples:
  offbeat push runs/my-run your-name/my-model --dry-run
  offbeat push runs/my-run your-name/my-model --private
  offbeat push runs/my-run your-name/my-model --checkpoint best --revision best --message "The best of 60 steps"
  offbeat push runs/my-run your-name/my-adapter --adapter --base-model HuggingFaceTB/SmolLM2-135M-Instruct
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/my-run")
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="the repository on the hub")
    parser.add_argument(
        "--checkpoint", default="last", metavar="WHICH", help="which export to send: last, best or a step's number (default: last)")
    parser.add_argument("--adapter", action="store_true", help="send the LoRA adapter alone, not the model into which it is merged")
    parser.add_argument(
        "--base-model", default="", metavar="OWNER/NAME", help="where the hub has the base model (default: model.path if it is a hub id)")
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="branch to send to, created if necessary (default: main)")
    parser.add_argument("--message", default="", help="message of the commit (default: one that names the run)")
    parser.add_argument("--private", action="store_true", help="create the repository as a private one")
    parser.add_argument("--dry-run", action="store_true", help="show the files and the card that would be sent, and send nothing")


def run(args: argparse.Namespace) -> int:
    """Send the model and print its address, or print a list of the files that would be sent; raises as `plan_push` and `send`."""
    push = plan_push(
        args.run_dir, args.repo_id, checkpoint=args.checkpoint, adapter=args.adapter, base_model=args.base_model,
        commit=Commit(args.revision, args.message), private=args.private)
    if args.dry_run:
        _show(push)
        return 0
    print(send(push))
    return 0


def _show(push: Push) -> None:
    sizes = push.sizes()
    print(f"would send to {push.repo_id}, branch {push.revision}: {push.message}")
    for name, size in sizes.items():
        print(f"  {size:>15,}  {name}")
    print(f"  {sum(sizes.values()):>15,}  bytes in {len(sizes)} files")
    print("The repository would be private." if push.private else "A new repository is public unless the owner's settings say otherwise.")
    for name, text in push.texts.items():
        print(f"\n{name}:\n\n{text}", end="")
