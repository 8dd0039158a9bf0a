"""An environment of verifiers 0.3, the classic interface: one question, and a tool."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def right(completion: list, answer: str) -> float:
    return float(answer in (completion[-1].get("content") or ""))


def load_environment() -> vf.Environment:
    return vf.ToolEnv(
        dataset=Dataset.from_list([{"question": "What is 3 + 4?", "answer": "7"}]), tools=[add], rubric=vf.Rubric(funcs=[right]),
        system_prompt="Use the tool, then answer.", max_turns=4)
