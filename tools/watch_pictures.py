"""Take the pictures of the live page that the documentation shows, with a headless Chromium.

    offbeat train examples/multi_turn_maths.toml
    python tools/watch_pictures.py runs/multi_turn_maths docs/images [--rollout 30.0.0]
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from offbeat.dashboard.rollout_index import Filter, RolloutIndex

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SIZES = {"rollouts": (1320, 960), "timeline": (1320, 900)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dir", type=Path, help="a run's folder")
    parser.add_argument("images", type=Path, help="where the pictures go")
    parser.add_argument("--rollout", help="the rollout that is shown (default: one of the newest with a reward, the longest)")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 2
    rollout = args.rollout or choose(args.run_dir)
    server = subprocess.Popen(
        [sys.executable, "-m", "offbeat", "watch", str(args.run_dir), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r" at (http://\S+/);", server.stdout.readline())
        if found is None:
            return 1
        for view, size in _SIZES.items():
            shown = urlencode({"run": args.run_dir.resolve().name, "view": view, "rollout": rollout})
            take(browser, f"{found[1]}#{shown}", args.images / f"watch-{view}.png", size)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    return 0


def choose(run_dir: Path) -> str:
    """Return the longest of the newest right answers."""
    index = RolloutIndex(run_dir)
    try:
        index.update()
        newest = index.find_rollouts(Filter(), limit=1)[0].step
        return index.find_rollouts(Filter(min_step=newest - 2, min_reward=0.1, status="trained"), order="longest", limit=1)[0].address
    finally:
        index.close()


def take(browser: str, url: str, path: Path, size: tuple[int, int]) -> None:
    """Take one picture."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
             f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=15000", f"--screenshot={path.resolve()}", url],
            check=True, stderr=subprocess.DEVNULL, timeout=200)
    print(path)


if __name__ == "__main__":
    raise SystemExit(main())
