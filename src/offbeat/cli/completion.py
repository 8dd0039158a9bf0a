"""`offbeat completion bash | zsh | fish`: prints a script that completes commands, options and settings in a shell."""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from offbeat.cli.main import COMMANDS, build_parser
from offbeat.config.load import settings
from offbeat.errors import MissingExtraError

DESCRIPTION = """\
Print a script that lets a shell complete commands, their options, and settings with their choices. It is made from what is installed, so
print it again after an update.
"""

EXAMPLES = """\
examples:
  offbeat completion bash > ~/.local/share/bash-completion/completions/offbeat
  offbeat completion zsh > "${fpath[1]}/_offbeat"
  offbeat completion fish > ~/.config/fish/completions/offbeat.fish
"""

_BASH = """\
_offbeat() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command="" options="" words="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$word" in
            -*) ;;
            *) command="$word"; break ;;
        esac
    done
    COMPREPLY=()
    local settings={settings}
    case "$command" in
        "") options={top}; words={commands} ;;
{cases}
    esac
    case "$command $prev" in
{choices}
    esac
    if [[ "$cur" == -* ]]; then
        COMPREPLY=( $(compgen -W "$options" -- "$cur") )
    elif [[ -n "$words" ]]; then
        COMPREPLY=( $(compgen -W "$words" -- "$cur") )
    fi
}}
"""


@dataclass(frozen=True)
class Option:
    """An option of a command: its long name such as "--model", a summary, and its values if they are few."""

    name: str
    summary: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Words:
    """Words that may follow a command; `choices` are values of its first argument if they are few, else a file may follow."""

    options: tuple[Option, ...] = ()
    choices: tuple[str, ...] = ()
    settings: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script; raises ConfigError if settings were given."""
    print({"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[args.shell](), end="")
    return 0


def words_of(command: str) -> Words:
    """Return the words that may follow a command, from its parser; none if the command's extra is not installed."""
    try:
        parser = build_parser(command)
    except MissingExtraError:
        return Words()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    actions = subparsers.choices[command]._actions
    options = tuple(
        Option(action.option_strings[-1], (action.help or "").split("; ")[0], tuple(map(str, action.choices or ())))
        for action in actions if action.option_strings)
    positional = next((action for action in actions if not action.option_strings and action.choices), None)
    choices = tuple(map(str, positional.choices)) if positional is not None and positional.choices else ()
    takes_settings = COMMANDS[command].no_settings is None and command != "engine"  # which has options alone
    return Words(options, choices, takes_settings)


def setting_options() -> Iterator[Option]:
    for name, info in settings():
        yield Option(f"--{name}", (info.description or "").partition("; ")[0], _choices(info.annotation))


def _choices(kind: Any) -> tuple[str, ...]:
    if kind is bool:
        return "true", "false"
    return tuple(str(choice) for choice in get_args(kind) if choice) if get_origin(kind) is Literal else ()


def bash_script() -> str:
    known = {name: words_of(name) for name in COMMANDS}
    of_settings = list(setting_options())
    cases, choices = [], []
    for name, words in known.items():
        options = shlex.quote(" ".join(option.name for option in words.options)) + ('" $settings"' if words.settings else "")
        cases.append(f"        {name}) options={options}; words={shlex.quote(' '.join(words.choices))} ;;")
        choices += [_bash_choice(f'"{name} {option.name}"', option) for option in words.options if option.choices]
    choices += [_bash_choice(f'*" {option.name}"', option) for option in of_settings if option.choices]
    return _BASH.format(
        settings=shlex.quote(" ".join(option.name for option in of_settings)), top=shlex.quote("--help --version --debug"),
        commands=shlex.quote(" ".join(known)), cases="\n".join(cases), choices="\n".join(choices),
    ) + "complete -o bashdefault -o default -F _offbeat offbeat\n"


def _bash_choice(pattern: str, option: Option) -> str:
    return f'        {pattern}) COMPREPLY=( $(compgen -W {shlex.quote(" ".join(option.choices))} -- "$cur") ); return ;;'


def zsh_script() -> str:
    """Return the script for zsh, which runs the script for bash."""
    return f"#compdef offbeat\nautoload -U +X bashcompinit && bashcompinit\n{bash_script()}"


def fish_script() -> str:
    lines = ["complete -c offbeat -n __fish_use_subcommand -l version -d 'print the version and end'"]
    takes_settings = []
    for name, command in COMMANDS.items():
        words, seen = words_of(name), f"__fish_seen_subcommand_from {name}"
        lines.append(f"complete -c offbeat -n __fish_use_subcommand -f -a {name} -d {_fish(command.summary)}")
        if words.choices:
            lines.append(f"complete -c offbeat -n {_fish(seen)} -a {_fish(' '.join(words.choices))}")
        lines += [_fish_option(seen, option) for option in words.options]
        takes_settings += [name] if words.settings else []
    seen = f"__fish_seen_subcommand_from {' '.join(takes_settings)}"
    return "\n".join([*lines, *(_fish_option(seen, option) for option in setting_options())]) + "\n"


def _fish_option(seen: str, option: Option) -> str:
    values = f" -x -a {_fish(' '.join(option.choices))}" if option.choices else ""
    return f"complete -c offbeat -n {_fish(seen)} -l {option.name.removeprefix('--')}{values} -d {_fish(option.summary[:80])}"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
