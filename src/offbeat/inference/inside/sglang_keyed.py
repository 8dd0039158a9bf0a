"""SGLang's server with the key that $OFFBEAT_ENGINE_KEY holds. Runs in SGLang's own environment and imports nothing of `offbeat`.

SGLang takes its key as an argument only. Arguments that a program adds for itself are not those that `ps` shows.
"""

import os
import runpy
import sys


def main() -> None:
    """Run `sglang.launch_server` with the arguments given and the key."""
    if key := os.environ.pop("OFFBEAT_ENGINE_KEY", ""):
        sys.argv += ["--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
