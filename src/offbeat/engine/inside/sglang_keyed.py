"""SGLang's server with the key from $OFFBEAT_ENGINE_KEY. Runs in SGLang's own environment and imports nothing of `offbeat`.

SGLang takes its key only as an argument. Arguments that a program adds to itself at run time are not shown by `ps`.
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
