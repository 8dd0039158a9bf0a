"""Reward 1 for a completion that equals the answer, ignoring surrounding white space. The default reward."""

from offbeat.data.row import Row


def exact_match(completion: str, row: Row) -> float:
    """Return 1.0 if the stripped completion equals the stripped answer, else 0.0."""
    return float(completion.strip() == row.answer.strip())
