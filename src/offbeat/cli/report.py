"""`offbeat report RUN_DIR`: writes a run's `report.html` from the files in its folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from offbeat.cli.main import refuse_settings
from offbeat.dashboard.report import write_report

_DESCRIPTION = """\
Write RUN_DIR/report.html: key figures, curves, a time line of trainer and engines, the configuration and the events.
The file is self-contained and opens in any browser. A run that is still in progress, or has crashed, is shown as far as it got.
"""

_EXAMPLES = """\
examples:
  offbeat report runs/my-run
  offbeat report runs/my-run && xdg-open runs/my-run/report.html
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("report", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/my-run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Write the report and print its path; raises ConfigError if settings were given, DataError if the folder is not a run."""
    refuse_settings(overrides, "report", "a report shows the run as it was configured")
    print(write_report(args.run_dir))
    return 0
