"""`offbeat report RUN_DIR`: writes a run's `report.html` from the files in its folder."""

import argparse
from pathlib import Path

from offbeat.dashboard.report import write_report

DESCRIPTION = """\
Write RUN_DIR/report.html: key figures, curves, a time line of trainer and engines, the configuration and the events.
The file is self-contained and opens in any browser. A run that is still in progress, or has crashed, is shown as far as it got.
"""

EXAMPLES = """\
examples:
  offbeat report runs/my-run
  offbeat report runs/my-run && xdg-open runs/my-run/report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/my-run")


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path; raises ConfigError if settings were given, DataError if the folder is not a run."""
    print(write_report(args.run_dir))
    return 0
