"""The reward of reasoning-gym's tasks: the family's own verifier, asked about the final answer of a completion.

The final answer is the text in the last `<answer>…</answer>`; without one it is the last number where the reference answer is a number, and
otherwise the whole completion. Many verifiers give a little for an answer of the right form, and a part for a part; 1.0 is right.
"""

import re

from offbeat.data.reasoning import verify
from offbeat.data.row import Row

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reasoning(completion: str, row: Row) -> float:
    """0.0 to 1.0, as the verifier of the row's family says."""
    return verify(final_answer(completion, row.answer), row)


def final_answer(completion: str, reference: str) -> str:
    """The part of a completion that states the answer."""
    if tagged := _TAGGED.findall(completion):
        return tagged[-1].strip()
    if _NUMBER.fullmatch(reference.strip()):
        return (_NUMBER.findall(completion.replace(",", "")) or [""])[-1]
    return completion.strip()
