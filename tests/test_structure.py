"""The figures of the structure: each is counted right in small made-up packages, growth is named, and ceilings only fall."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = {"config/root.py": "class Config: pass\n"}
OBJECTIVES = "OBJECTIVES: Mapping[str, Objective] = MappingProxyType({'ppo': Objective(constants={'clip': 1}), 'kto': Objective()})\n"
TABLES = {
    "config/objectives.py": OBJECTIVES,
    "config/engine_kinds.py": "ENGINE_KINDS: Mapping[str, EngineKind] = MappingProxyType({'embedded': A(), 'vllm': A()})\n",
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool, as a module."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("structure")
    finally:
        sys.path.pop(0)


@pytest.fixture
def find(tool, tmp_path):
    """Counts a measure in a made-up package: `find(measure, files)` gives the figure and the places."""
    measures = {measure.name: measure for measure in tool.MEASURES}

    def found(name, files):
        figure, spots = measures[name].find(tool.read_modules(write(tmp_path / "package", files)))
        return figure, [spot.where for spot in spots]

    return found


def write(folder, files):
    """Write a package; returns its folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_classes_are_twins_across_modules_alone(find):
    nested = "class One: pass\nclass Two:\n    class In: pass\nclass Two: pass\n"
    figure, places = find("class-twins", {"a.py": nested, "b/a.py": "\nclass One: pass\n", "c.py": "class In: 1"})
    assert (figure, sorted(places)) == (2, ["a.py:1, b/a.py:2", "a.py:3, c.py:1"])


def test_functions_are_counted_from_8_files_on_with_methods_and_private_ones(find):
    files = {f"{i}.py": "def run(): pass\ndef __init__(): pass\n" if i else "class A:\n    async def run(self): pass\n" for i in range(8)}
    files |= {f"{i}_more.py": "def _take(): pass\ndef _take(): pass\n" for i in range(7)}
    figure, [places] = find("function-twins", files)
    assert figure == 1 and places.startswith("0.py:2, 1.py:1, ")


def test_files_are_twins_by_their_names_but_not_those_that_python_names(find):
    assert find("file-twins", {"a/x.py": "", "b/x.py": "", "a/__init__.py": "", "b/__init__.py": ""}) == (1, ["a/x.py:1, b/x.py:1"])


CALLABLES = """\
class Door:
    def __init__(self, on_open: Callable[[], None], on_end: "Callable[..., Awaitable[None]] | None", say: Say, size: int): pass

@dataclass(frozen=True)
class Parts:
    find: Callable[[int], int]
    all: tuple[Callable[[int], int], ...] = ()
    make: Callable[[], int] = int
    number: int = 1

class Plain:
    kept: Callable[[], int]
    def run(self, *, wait: collections.abc.Callable[[], None]) -> Callable[[], None]: pass
"""


def test_callables_are_counted_in_parameters_and_in_fields_of_dataclasses(find):
    figure, places = find("callables", {"a.py": CALLABLES})
    assert figure == 6 and sorted(places) == ["a.py:13", "a.py:2", "a.py:2", "a.py:6", "a.py:7", "a.py:8"]


def test_the_largest_constructor_is_named(find):
    assert find("constructor-callables", {"a.py": CALLABLES}) == (3, ["a.py:5"])


def test_parameters_are_counted_without_self_and_stars(find):
    source = "class A:\n    def seven(self, a, /, b, c, *d, e, f, g, h, **i): pass\n    def eight(self, a, b, c, d, *, e, f, g, h): pass\n"
    assert find("parameters", {"a.py": source}) == (1, ["a.py:3"])


def test_the_configuration_is_followed_from_run_training_through_imports_names_and_fields(find):
    of_config = "from offbeat.config.root import Config\n"
    files = CONFIG | {
        "runs/run.py": "from offbeat.loop import learn\n" + of_config + "def run_training(config: Config): pass\n",
        "parts.py": of_config + "class Parts:\n    config: Config\n",
        "loop.py": "from offbeat.parts import Parts\nWORKER = 'offbeat.worker:Worker'\ndef learn(parts: Parts): parts.config.seed\n",
        "worker.py": of_config + "def start(text):\n    return Config.model_validate_json(text)\n",
        "config/rules.py": of_config + "def check(config: Config): pass\n",
        "own.py": "from uvicorn import Config\ndef serve(config: Config): pass\n",
        "cli.py": of_config + "def command(config: Config): pass\n",
    }
    files["worker.py"] = "from offbeat import own\n" + files["worker.py"]
    figure, places = find("config-files", files)
    assert (figure, sorted(places)) == (4, ["loop.py:3", "parts.py:3", "runs/run.py:3", "worker.py:4"])


OF_CONFIG = "from offbeat.config.root import Config\n"
RUN = "from offbeat.{module} import {name}\n" + OF_CONFIG + "def run_training(config: Config): pass\n"


@pytest.mark.parametrize(("files", "pairs"), [
    ({"runs/run.py": RUN.format(module="runs.plan", name="Plan") + "def tell(plan: Plan): plan.config.seed\n",
      "runs/plan.py": OF_CONFIG + "class Plan:\n    config: Config\n"}, ["runs/plan.py -> runs/run.py"]),
    ({"runs/run.py": RUN.format(module="data.made", name="made") + "x = made()\n",
      "data/made.py": OF_CONFIG + "def made() -> tuple[Config, int]: pass\n"}, ["data/made.py -> runs/run.py"]),
    ({"runs/run.py": OF_CONFIG + "MODE = ('offbeat.spmd.rank', 'open_rank')\ndef run_training(config: Config): pass\n",
      "spmd/rank.py": OF_CONFIG + "def open_rank(config: Config): pass\n"}, ["runs/run.py -> spmd/rank.py"]),
    ({"runs/run.py": RUN.format(module="data.base", name="on_base"),
      "data/base.py": "from collections.abc import Callable\n" + OF_CONFIG + "def on_base(make: Callable[[Config], None]): pass\n"},
     ["data/base.py -> runs/run.py"]),
    ({"runs/run.py": RUN.format(module="data.read", name="read") + "x = read(Config())\n",
      "data/read.py": OF_CONFIG + "def read(config: Config) -> int: pass\n"}, []),
], ids=["field", "result", "name", "callback", "argument"])
def test_the_configuration_climbs_where_a_lower_module_hands_it_up(tool, tmp_path, files, pairs):
    measures = {measure.name: measure for measure in tool.MEASURES}
    figure, spots = measures["config-climbs"].find(tool.read_modules(write(tmp_path / "package", CONFIG | files)))
    assert (figure, [spot.name for spot in spots]) == (len(pairs), pairs)


@pytest.mark.parametrize("line", [
    "x.objective == 'ppo'", "'vllm' != kind", "x in ('kto', y)", "x.kind in {'reward-model'}", "'ppo' in x.names",
    "[case for case in y if case.engine == 'embedded']",
])
def test_a_test_by_name_is_seen(find, line):
    assert find("name-tests", TABLES | {"a.py": f"\ny = {line}\n"}) == (1, ["a.py:2"])


@pytest.mark.parametrize("line", ["x == 'clip'", "'ppo' in x()", "x['ppo'] < 1", "x == ppo", "{'ppo': x}", "x == 'sglang'"])
def test_another_comparison_is_none(find, line):
    assert find("name-tests", TABLES | {"a.py": f"y = {line}\n"}) == (0, [])


def test_cases_of_a_match_are_tests_by_name_and_tables_are_free(find):
    case = "match x:\n    case 'ppo' | 'other':\n        pass\n"
    table = TABLES["config/engine_kinds.py"] + "x = y == 'ppo'\n"
    assert find("name-tests", TABLES | {"a.py": case, "config/engine_kinds.py": table})[0] == 1


def test_the_table_of_objectives_may_stand_in_the_configuration(find):
    tables = {"config/objectives.py": "OBJECTIVES = {'ppo': 1, **OTHERS}\n"}
    assert find("name-tests", tables | {"a.py": "x == 'ppo'\n"}) == (1, ["a.py:1"])


@pytest.mark.parametrize(("handler", "counts"), [
    ("except Exception:\n    pass", True), ("except:\n    return", True),
    ("except (OSError, BaseException) as exc:\n    raise E from exc", True),
    ("except builtins.Exception:\n    raise\n    x = 1", True), ("except BaseException:\n    close()\n    raise", False),
    ("except Exception as exc:\n    raise exc", False), ("except OSError:\n    pass", False), ("except ExceptionGroup:\n    pass", False),
])
def test_a_broad_handler_counts_if_it_does_not_raise_the_same_again(find, handler, counts):
    source = f"try:\n    g()\n{handler}\n\ntry:\n    g()\nexcept OSError:\n    pass\n"
    assert find("broad-handlers", {"a.py": source}) == ((50.0, ["a.py:3"]) if counts else (0.0, []))


@pytest.mark.parametrize(("text", "name", "says"), [
    ("[P, G] float32.", "x", True), ("2 x [M] numbers.", "x", True), ("[2, N] and more.", "x", True), ("As `rewards_PG`.", "x", True),
    ("Numbers.", "logits_TV", True), ("[T + 1] numbers.", "x", True), ("[rollout] is a section.", "x", False), ("Numbers.", "x", False),
])
def test_a_docstring_says_a_shape(find, text, name, says):
    source = f'def f({name}: "Tensor | None"):\n    """{text}"""\ndef g() -> NDArray[int]: pass\ndef h(x: int):\n    """Add."""\n'
    assert find("shapes", {"a.py": source}) == ((100.0, []) if says else (0.0, ["a.py:1"]))


PROSE = '''\
"""Ten words of a module, and what it is for."""

SIZE = 4  # what "fits", such as four
TEXT = "# what is no comment"
MODES = ("a",)
"""Modes, e.g. a:

    for what

>>> mode()
'a'
"""
'''


def test_words_and_examples_are_those_of_docstrings_and_comments(find):
    figure, places = find("whats", {"a.py": PROSE})
    words = 10 + 5 + 8
    assert (round(figure * words / 1000, 6), sorted(places)) == (3, ["a.py:1", "a.py:3", "a.py:8"])
    figure, places = find("examples", {"b.py": '"""No example."""\n'})
    words += 2
    assert (round(figure * words / 1000, 6), places) == (4, ["b.py:1"])


def test_lines_and_sizes_are_counted(find):
    files = {"a/b.py": "def long():\n" + "    x = 1\n" * 60 + "def short():\n" + "    x = 1\n" * 59, "c.py": "\n" * 401, "d.py": "\n" * 400}
    assert find("lines", files) == (0.922, ["801 lines", "121 lines"])
    assert find("long-functions", {}) == (1, ["a/b.py:1"])
    assert find("long-files", {}) == (1, ["c.py:1"])


@pytest.fixture
def main(tool, tmp_path, capsys):
    """Runs the tool over the made-up package: `main(*argv)` gives the exit code and the lines."""
    def run(*argv):
        code = tool.main(argv, source=tmp_path / "package", ceilings=tmp_path / "structure.json")
        return code, capsys.readouterr().out.splitlines()

    return run


def stored(tmp_path):
    """Return the figures of the file."""
    return {name: each["figure"] for name, each in json.loads((tmp_path / "structure.json").read_text(encoding="utf-8")).items()}


def test_growth_fails_in_one_sentence_that_names_the_new_cases(main, tmp_path):
    write(tmp_path / "package", {"a.py": "class Old: pass\nclass New: pass\n", "b.py": "class Old: pass\n"})
    code, lines = main()
    assert code == 1 and "class-twins: structure.json has no figure; store today's: python tools/structure.py --tighten" in lines
    assert main("--tighten")[0] == 0
    assert main()[0] == 0
    write(tmp_path / "package", {"b.py": "\nclass Old: pass\nclass New: pass\n"})
    code, lines = main()
    assert code == 1
    assert lines[-1] == (
        "class-twins: class names defined in two modules or more must be at most 1, got 2; new are New at a.py:2, b.py:3;"
        " `python tools/structure.py --list class-twins` lists all")
    [row] = [line for line in lines if line.startswith("class-twins:") and "|" in line]
    assert [cell.strip() for cell in row.split("|")[1:]] == ["2", "1", "10"]
    assert main("--list", "class-twins") == (0, ["a.py:1, b.py:2  Old", "a.py:2, b.py:3  New"])


def test_a_share_that_should_grow_may_not_fall(main, tmp_path):
    source = 'def f(x: Tensor):\n    """[T]."""\ndef g(x: Tensor):\n    """{}."""\n'
    write(tmp_path / "package", {"a.py": source.format("[T]")})
    main("--tighten")
    write(tmp_path / "package", {"a.py": source.format("Not")})
    code, lines = main()
    assert code == 1 and "must be at least 80.0, got 50.0; new are a.py g at a.py:3;" in lines[-1], "the aim is 80, which was reached"


def test_tightening_works_only_downwards_and_raising_needs_a_word(main, tmp_path):
    twins = {"a.py": "class A: pass\nclass B: pass\n", "b.py": "class A: pass\nclass B: pass\n"}
    write(tmp_path / "package", twins)
    main("--tighten")
    write(tmp_path / "package", {"b.py": "class A: pass\n"})
    assert main("--tighten")[0] == 0 and stored(tmp_path)["class-twins"] == 1
    write(tmp_path / "package", twins)
    assert main("--tighten")[0] == 1 and stored(tmp_path)["class-twins"] == 1
    assert main("--allow", "long-files")[0] == 1 and stored(tmp_path)["class-twins"] == 1
    assert main("--allow", "class-twins")[0] == 0 and stored(tmp_path)["class-twins"] == 2


def test_the_tables_of_names_are_where_the_tool_looks(tool):
    assert {"ppo", "kto", "embedded", "sglang"} <= tool.source_figures.names_of_tables(tool.read_modules(tool.SOURCE))


def test_the_file_has_the_measures_of_the_tool(tool):
    assert list(json.loads(tool.CEILINGS.read_text(encoding="utf-8"))) == [measure.name for measure in tool.MEASURES if measure.bounded]
