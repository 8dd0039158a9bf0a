"""vLLM's command line, in a process that SIGTERM does not end, with Offbeat's forms of weights if one is asked for.

Runs in vLLM's own environment and imports nothing of `offbeat`.
"""

import sys

from no_sigterm import ignore_sigterm

ignore_sigterm()


def main() -> None:
    """Run `vllm` with the arguments given."""
    # Processes that vLLM spawns import this file, and nothing of the following.
    if any("offbeat_int" in word for word in sys.argv):
        import vllm_quantized  # noqa: F401, PLC0415
    from vllm.entrypoints.cli.main import main as vllm_main  # noqa: PLC0415

    vllm_main()


if __name__ == "__main__":
    main()
