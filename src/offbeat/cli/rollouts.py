"""`offbeat rollouts RUN_DIR`: lists the rollouts of a run, filtered, or prints one as a conversation with coloured tokens."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from offbeat.dashboard.conversation import messages_of
from offbeat.dashboard.rollout_filter import ORDERS, STATUSES, Filter
from offbeat.dashboard.rollout_index import RolloutIndex
from offbeat.dashboard.run_files import check_run
from offbeat.data.image_store import find_pictures
from offbeat.data.stored_rollouts import Address, KeptGroup, KeptTrajectory, find_group
from offbeat.data.wire import encode_json
from offbeat.errors import ConfigError

DESCRIPTION = """\
Print the rollouts that a run has kept, the newest first: prompts, completions and rewards, and which rollouts were rejected and why. Runs
in progress can be read, too. The first call reads all files and keeps an index beside them; later calls are quick.
"""

EXAMPLES = """\
examples:
  offbeat rollouts runs/my-run
  offbeat rollouts runs/my-run --step 10 --order worst
  offbeat rollouts runs/my-run --min-reward 1 --text "therefore the answer"
  offbeat rollouts runs/my-run --status rejected
  offbeat rollouts runs/my-run --show 12.3.0
  offbeat rollouts runs/my-run --prompt 31752 --json | jq .reward
"""

_PIPE_WIDTH = 120
"""Width in characters of a list that is not written to a terminal, unless $COLUMNS gives it."""
_LEAST_TEXT = 12
"""Least width of a prompt and of a completion in a list, even where its lines then become longer than the terminal."""
_MOST_REASON = 24
"""Largest width of the column of reasons in a list."""
_GAP = 2
"""Padding of each column of a table, in characters."""
_CHAT = re.compile(r"(system|user|assistant|tool): ")
_USER = re.compile(r"(?:\A|\n)user: ")
_RANGES = {"step": int, "reward": float, "length": int, "version": int}
_LARGEST = 2**53
"""Bound on the size of numbers in filters."""
_SCALE = ((-0.05, ""), (-0.7, "green"), (-2.3, "yellow"), (-4.6, "dark_orange"), (float("-inf"), "red"))
"""Colour of a token by its log-probability, from this bound upwards: probability above 0.95, 0.5, 0.1, 0.01, and below."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/my-run")
    parser.add_argument("--show", metavar="ID", help="print this rollout as a conversation, and its group's others; IDs are in the list")
    parser.add_argument("--step", type=int, metavar="N", help="only of this global step")
    for name, kind in _RANGES.items():
        for bound in ("min", "max"):
            parser.add_argument(f"--{bound}-{name}", type=kind, metavar="X", help=_help(bound, name))
    parser.add_argument("--prompt", default="", metavar="TEXT", help="only prompts that contain this")
    parser.add_argument("--text", default="", metavar="WORDS", help="only those with these words in a row; a final * matches any ending")
    parser.add_argument("--reason", default="", metavar="WHY", help='only those with this end, such as stop, length, "equal rewards"')
    parser.add_argument("--status", default="", choices=STATUSES, help="only those trained on, left out, or rejected with their group")
    parser.add_argument("--same-prompt", metavar="ID", help="only those of the same prompt as this rollout, in all steps")
    parser.add_argument("--order", default="newest", choices=ORDERS, help="order of the list (default: newest)")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="number of rollouts printed (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with all fields; with --show the whole group")


def run(args: argparse.Namespace) -> int:
    """Print a list of rollouts, or one; raises ConfigError for settings or an invalid filter, DataError for no such run or rollout."""
    if not 1 <= args.limit <= _LARGEST:
        raise ConfigError(f"--limit must be at least 1 and at most 2^53, got {args.limit}")
    check_run(args.run_dir)
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _PIPE_WIDTH)
    if args.show is not None:
        address = Address.parse(args.show)
        group = find_group(args.run_dir, address)
        if args.json:
            print(encode_json(group).decode())
        else:
            _print_group(console, group, address, args.run_dir)
        return 0
    index = RolloutIndex(args.run_dir)
    try:
        progress = index.update()
        wanted = _filter(args)
        found, total = index.find_rollouts(wanted, order=args.order, limit=args.limit), index.num_found(wanted)
    finally:
        index.close()
    if args.json:
        for each in found:
            print(json.dumps(asdict(each), ensure_ascii=False))
        return 0
    for damage in progress.damage:
        console.print(_styled(damage, style="red"))
    if not progress.num_rollouts:
        print(f"{args.run_dir} has kept no rollouts yet; telemetry.rollouts_every_steps says how often they are written")
        return 0
    rows = [(
        [each.address, _figure(each.reward), _figure(each.advantage, sign=True), str(each.length),
         "" if each.version is None else str(each.version), each.reason],
        [_asked(each.prompt), each.preview], "dim" if each.status != "trained" else "") for each in found]
    _print_table(console, ("id", "reward", "advantage", "tokens", "version", "ended"), ("prompt", "written"), rows)
    shown = f"the first {len(found)} of {total:,}" if total > len(found) else f"{total:,}"
    console.print(_styled(f"{shown} rollouts of {progress.num_rollouts:,}; --show ID prints one", style="dim"))
    return 0


def _asked(prompt: str) -> str:
    """Return the last user message of a chat, since the messages before it are often the same in all rows; else the whole prompt."""
    return _USER.split(prompt)[-1] if _CHAT.match(prompt) else prompt


def _help(bound: str, name: str) -> str:
    what = {
        "step": "a global step", "reward": "a reward", "length": "a number of generated tokens",
        "version": "an oldest version of their tokens"}[name]
    return f"only those with {what} of {'at least' if bound == 'min' else 'at most'} this"


def _filter(args: argparse.Namespace) -> Filter:
    bounds = {f"{bound}_{name}": getattr(args, f"{bound}_{name}") for name in _RANGES for bound in ("min", "max")}
    if args.step is not None:
        bounds |= {"min_step": args.step, "max_step": args.step}
    if wrong := next((name for name, value in bounds.items() if value is not None and not abs(value) <= _LARGEST), None):  # also NaN
        option = "step" if args.step is not None and wrong.endswith("_step") else wrong.replace("_", "-")
        raise ConfigError(f"--{option} must be a number within 2^53, got {bounds[wrong]}")
    same = None if args.same_prompt is None else Address.parse(args.same_prompt)
    return Filter(**bounds, prompt=args.prompt, text=args.text, reason=args.reason, status=args.status, same_prompt=same)


def _print_table(
    console: Console, facts: Sequence[str], texts: Sequence[str], rows: Sequence[tuple[Sequence[str], Sequence[str], str]],
) -> None:
    """Print a table whose facts are never cut, and whose texts share the remaining width.

    Args:
        facts, texts: titles of the columns; there are one or two texts.
        rows: facts, texts and style of each row.
    """
    names = (*facts, *texts)
    shown = [([_visible(_one_line(cell)) for cell in (*row_facts, *row_texts)], style) for row_facts, row_texts, style in rows]
    wanted = [max(map(cell_len, column)) for column in zip(names, *(cells for cells, _ in shown), strict=True)]
    whole = [min(want, _MOST_REASON) if name == "ended" else want for name, want in zip(facts, wanted, strict=False)]
    gaps = _GAP * len(names)
    widths = [*whole, *_text_widths(wanted[len(facts):], room=console.width - sum(whole) - gaps)]
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name, width in zip(names, widths, strict=True):
        justify = "right" if name in ("reward", "advantage", "tokens", "version") else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", width=width)
    for cells, style in shown:
        table.add_row(*(Text(cell) for cell in cells), style=style)
    console.width = max(console.width, sum(widths) + gaps)  # a terminal that is too narrow wraps the lines itself
    console.print(table)


def _text_widths(wanted: Sequence[int], *, room: int) -> list[int]:
    """Divide the remaining width: a prompt gets a third if it and the completion after it do not both fit; see `_LEAST_TEXT`."""
    *before, last = wanted
    widths = [min(want, max(room // 3, room - last, _LEAST_TEXT)) for want in before]
    return [*widths, min(last, max(room - sum(widths), _LEAST_TEXT))]


def _print_group(console: Console, group: KeptGroup, address: Address, run_dir: Path) -> None:
    if group.trajectories:
        shown = group.trajectories[address.place]
        _print_trajectory(console, group, shown, address, find_pictures(run_dir, shown.tokens).values())
    else:
        console.print(_styled(f"prompt {group.prompt_id}: {group.prompt}"))
    if group.rejected is not None:
        again = "; its prompt came again" if group.drawn_again else ""
        console.print(_styled(f"\nThe group was rejected ({group.why}){again}: {group.rejected}", style="yellow"))
    if len(group.trajectories) > 1:
        console.print(_styled("\nThe group's samples", style="bold"))
        rows = [(
            [str(Address(address.step, address.is_rejected, address.group, place)), _figure(t.reward), _figure(t.advantage, sign=True),
             str(t.num_generated), t.reason.partition(": ")[0]],
            [t.completion], "bold" if place == address.place else "") for place, t in enumerate(group.trajectories)]
        _print_table(console, ("id", "reward", "advantage", "tokens", "ended"), ("written",), rows)


def _print_trajectory(console: Console, group: KeptGroup, t: KeptTrajectory, address: Address, pictures: Iterable[Path]) -> None:
    versions = sorted({version for version, generated in zip(t.versions, t.loss_mask, strict=True) if generated})
    facts = {
        "step": str(group.step), "prompt": group.prompt_id, "agent": t.agent, "reward": _figure(t.reward),
        **{name: _figure(value) for name, value in t.named_rewards.items()}, "advantage": _figure(t.advantage, sign=True),
        "tokens": str(t.num_generated), "versions": ", ".join(map(str, versions)), "ended": t.reason, "answer": _one_line(group.answer)}
    head = _styled(f"rollout {address}", style="bold")
    for name, value in facts.items():
        if value:
            head.append(f"  {name} ", style="not bold dim").append(_visible(value), style="not bold")
    console.print(head)
    pieces = t.pieces
    for message in messages_of(t):
        title = f"turn {message.turn}" if message.role == "policy" else message.role
        console.print(_styled(f"\n── {title} ", style="bold cyan" if message.role == "policy" else "dim"))
        text = Text()
        for place in range(message.start, message.end):
            text.append(_visible(pieces[place]), style=_style(t, place))
        console.print(text)
    for path in pictures:
        console.print(_styled(f"\npicture: {path}", style="dim"), soft_wrap=True)
    legend = _styled("\nprobability of a token: ", style="dim")
    for (_, colour), label in zip(_SCALE, ("over 95 %", "over 50 %", "over 10 %", "over 1 %", "less"), strict=True):
        legend.append(f" {label} ", style=Style(color=colour or None, dim=False))
    console.print(legend)


def _style(t: KeptTrajectory, place: int) -> Style:
    if not t.loss_mask[place]:
        return Style(dim=True)
    logprob = t.rollout_logprobs[place]
    colour = next((colour for bound, colour in _SCALE if logprob is not None and logprob >= bound), "")
    return Style(color=colour or None)


def _styled(text: str, style: str = "") -> Text:
    return Text(_visible(text), style=style)


def _figure(value: float | None, *, sign: bool = False) -> str:
    return "" if value is None else f"{value:+.3g}" if sign and value else f"{value:.4g}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


def _visible(text: str) -> str:
    """Return text without the control characters of a terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)
