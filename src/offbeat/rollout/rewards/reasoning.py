"""Reward for reasoning-gym's tasks: each family's own verifier, applied to the final answer of a completion.

The final answer is the text in the last `<answer>…</answer>`. Without one, it is the last number if the reference answer is a number, and
the whole completion otherwise. Many verifiers give partial credit for the right form or for parts of the answer; 1.0 is a correct answer.
"""

import re

from offbeat.data.reasoning import verify
from offbeat.data.row import Row

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reasoning(completion: str, row: Row) -> float:
    """Return the score by the verifier of the row's family, 0.0 to 1.0."""
    return verify(final_answer(completion, row.answer), row)


def final_answer(completion: str, reference: str) -> str:
    """Return the part of a completion that states the answer."""
    if tagged := _TAGGED.findall(completion):
        return tagged[-1].strip()
    if _NUMBER.fullmatch(reference.strip()):
        return (_NUMBER.findall(completion.replace(",", "")) or [""])[-1]
    return completion.strip()
