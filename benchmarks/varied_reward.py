"""A reward that differs from sample to sample, so that both sides of `real.py` train on all of them: there is nothing to learn from it."""


def varied(completion: str, _row: object) -> float:
    """0 to 1, by the different characters that a completion has."""
    return min(1.0, len(set(completion)) / 50)
