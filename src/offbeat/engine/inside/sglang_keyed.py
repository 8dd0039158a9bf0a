"""SGLang's server with the key from $OFFBEAT_ENGINE_KEY, in a process that SIGTERM does not end. Runs in SGLang's own environment and
imports nothing of `offbeat`.

SGLang takes its key only as an argument. Arguments that a program adds to itself at run time are not shown by `ps`.
"""

import os
import runpy
import sys

from no_sigterm import ignore_sigterm

ignore_sigterm()


def main() -> None:
    """Run `sglang.launch_server` with the arguments given and the key."""
    if key := os.environ.pop("OFFBEAT_ENGINE_KEY", ""):
        sys.argv += ["--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
