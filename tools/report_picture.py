"""Take the picture of a report that the documentation shows, with a headless Chromium.

    offbeat quickstart
    python tools/report_picture.py runs/quickstart docs/images/report.png
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from watch_pictures import BROWSERS, take

from offbeat.dashboard.report import write_report

_SIZE = (1215, 1490)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dir", type=Path, help="a run's folder")
    parser.add_argument("picture", type=Path, help="where the picture goes")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = write_report(args.run_dir).read_bytes()
        page = Path(folder) / "report.html"
        page.write_bytes(report)  # a browser of a confined installation may see no other folder
        take(browser, page.as_uri(), args.picture, _SIZE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
