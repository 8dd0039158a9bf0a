"""The tool `python`: a calculator that takes programs, for tool-integrated reasoning. `sandbox.py` confines them."""

from offbeat.agents.tools.sandbox import Sandbox

_SANDBOX = Sandbox()
_SANDBOX.check()  # so that a run which names this tool ends before anything is trained where programs cannot be confined


def python(code: str) -> str:
    """Run a Python program and return what it prints. Each program starts anew; it has no network and its files are gone afterwards.

    Args:
        code: the program. The value of an expression in its last line is printed, too.
    """
    return _SANDBOX.run(code).text
