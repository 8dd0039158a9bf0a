"""vLLM's command line, in a process that SIGTERM does not end. Runs in vLLM's own environment and imports nothing of `offbeat`."""

from no_sigterm import ignore_sigterm

ignore_sigterm()


def main() -> None:
    """Run `vllm` with the arguments given."""
    from vllm.entrypoints.cli.main import main as vllm_main  # noqa: PLC0415 (processes that vLLM spawns import this file, and not this)

    vllm_main()


if __name__ == "__main__":
    main()
