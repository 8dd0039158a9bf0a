"""What the system says of a process's signals."""

import re
import signal
from pathlib import Path


def has_signal(pid: int, number: signal.Signals, *, mask: str) -> bool:
    """Whether a signal is in a mask of the process: ShdPnd are those that wait for it, SigIgn those that it ignores, SigCgt handles."""
    (bits,) = re.findall(rf"^{mask}:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(bits, 16) >> (number - 1) & 1)
