"""`offbeat data show`: prints the first rows as the model will see them, in tokens, and counts rows that cannot be used.

`offbeat data prune` removes stored images of runs whose folders are gone.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console as Terminal
from rich.text import Text as Styled

from offbeat.cli.common import add_config_argument
from offbeat.cli.named import add_named_arguments, named_config
from offbeat.config.root import TRAINING_KINDS
from offbeat.controller.preview import Preview, ShownRow, Text, preview
from offbeat.data.image_pruning import prune_images
from offbeat.data.image_store import images_folder
from offbeat.errors import ConfigError
from offbeat.runs.check import pairs_in

_ROWS = {"rl": "prompts", "sft": "sequences to imitate", "pairs": "preferences"}
_KINDS = {"rl": TRAINING_KINDS["train"], "sft": TRAINING_KINDS["sft"], "pairs": TRAINING_KINDS["dpo"]}
_MOST_REASONS = 10
_OPEN, _CLOSE = "⟦", "⟧"
"""Marks around trained tokens, where there are no colours."""

DESCRIPTION = """\
Show the first rows of the data as the model will see them: the text of their tokens, with the trained tokens in green (in ⟦ ⟧
without colours), the number of tokens, and the number of rows that cannot be used, with the reasons. With `prune`, remove the images
that are stored beside runs, in .images, and that only runs used whose folders are gone.
"""

EXAMPLES = """\
examples:
  offbeat data show task.toml                     prompts of reinforcement learning, or preferences if the data has them
  offbeat data show task.toml --as sft -n 1       rows of `offbeat sft`, with the tokens that it trains on
  offbeat data show --model runs/first/export --data rows.jsonl
  offbeat data prune --run.dir runs               remove stored images of runs that are gone
  offbeat data show task.toml --data.prompt '{question}\\nAnswer:'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "prune"), help="what to do")
    add_config_argument(parser, optional=True)
    add_named_arguments(parser, data="rows to show: a file, a folder, a hub id or a built-in task")
    parser.add_argument("-n", type=int, default=3, metavar="ROWS", help="number of rows to show (default 3)")
    parser.add_argument("--as", dest="kind", choices=tuple(_KINDS), help="rl, sft or pairs; by default what the rows are")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Print the first rows and a summary of all; raises ConfigError if `-n` is negative, or the configuration is wrong."""
    if args.n < 0:
        raise ConfigError(f"-n must be at least 0, got {args.n}")
    config = named_config(args, overrides, command="data show" if args.action == "show" else "")
    if args.action == "prune":
        return _prune(images_folder(config.run_dir), as_json=args.json)
    kind = args.kind or ("pairs" if pairs_in(config.data) else "rl")
    found = preview(config, _KINDS[kind], count=args.n)
    if args.json:
        for row in found.rows:
            print(json.dumps(asdict(row), ensure_ascii=False))
        print(json.dumps({"kind": kind} | {name: value for name, value in asdict(found).items() if name != "rows"}, ensure_ascii=False))
        return 0
    terminal = Terminal(file=sys.stdout, highlight=False, soft_wrap=True)
    colours = terminal.is_terminal and not terminal.no_color
    for row in found.rows:
        terminal.print(Styled("\n").join(_row(row, colours=colours)), end="\n\n")
    for line in _summary(found, _ROWS[kind]):
        terminal.print(line, markup=False)
    return 0


def _prune(folder: Path, *, as_json: bool) -> int:
    pruned = prune_images(folder)
    if as_json:
        print(json.dumps(asdict(pruned)))
        return 0
    runs = ", ".join(pruned.runs) or "none"
    print(f"{folder}: images removed: {pruned.num_removed}, {pruned.removed_bytes / 1e6:.1f} MB; runs gone: {runs}")
    advice = f", {pruned.num_unknown} of them noted by no run: delete the folder when no run there is to go on"
    unknown = advice if pruned.num_unknown else ""
    print(f"images kept: {pruned.num_kept}{unknown}")
    return 0


def _row(row: ShownRow, *, colours: bool) -> Iterator[Styled]:
    for text in row.texts:
        trained = f", {text.num_trained} of them trained on" if text.num_trained else ""
        title = f"{row.where}{f' · {text.title}' if text.title else ''} · {text.num_tokens} tokens{trained}"
        yield Styled(f"── {title} ──", style="bold" if colours else "")
        yield _coloured(text) if colours else Styled("".join(
            f"{_OPEN}{piece}{_CLOSE}" if is_trained else piece for piece, is_trained in text.pieces))
    for path in row.pictures:
        yield Styled(f"picture: {path}", style="dim" if colours else "")
    if row.answer:
        yield Styled(f"answer, for rewards: {row.answer}", style="dim" if colours else "")
    if row.columns:
        yield Styled(f"columns, for rewards: {', '.join(row.columns)}", style="dim" if colours else "")


def _coloured(text: Text) -> Styled:
    return Styled.assemble(*((piece, "green" if is_trained else "") for piece, is_trained in text.pieces))


def _summary(found: Preview, rows: str) -> Iterator[str]:
    count = "endlessly many" if found.num_rows is None else str(found.num_rows)
    yield f"{rows}: {count} rows to train on, {found.num_heldout} held out"
    if found.lengths:
        mean = sum(found.lengths) / len(found.lengths)
        yield f"tokens of a row: {min(found.lengths)} to {max(found.lengths)}, mean {mean:.1f}, in the first {len(found.lengths)} rows"
    if not (found.unusable or found.refused):
        yield "all rows can be used"
    if found.unusable:
        yield f"rows that cannot be used: {len(found.unusable)}, allowed are data.max_unusable_rows = {found.allowed}"
        yield from _reasons(found.unusable)
    if found.refused:
        yield f"rows that a run refuses: {len(found.refused)} of the first {len(found.refused) + len(found.lengths)}"
        yield from _reasons(found.refused)
    if found.unwritable:
        yield found.unwritable


def _reasons(reasons: Sequence[str]) -> Iterator[str]:
    yield from (f"  {reason}" for reason in reasons[:_MOST_REASONS])
    if (more := len(reasons) - _MOST_REASONS) > 0:
        yield f"  and {more} more"
