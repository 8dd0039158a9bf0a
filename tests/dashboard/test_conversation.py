"""Messages of a rollout."""

import pytest

from offbeat.dashboard.conversation import MessageSpan, messages_of
from offbeat.data.stored_rollouts import KeptTrajectory


def rollout(*parts: str) -> KeptTrajectory:
    """Tokens are given, but for those of parts that begin with "!", which the policy wrote; "|" separates tokens."""
    pieces, mask = [], []
    for part in parts:
        own = part.removeprefix("!").split("|")
        pieces += own
        mask += [part.startswith("!")] * len(own)
    return KeptTrajectory(
        list(range(len(pieces))), mask, [0.0] * len(mask), [-1] * len(mask), 1.0, text="".join(pieces), lengths=[len(p) for p in pieces])


def roles(t: KeptTrajectory) -> list[tuple[str, str]]:
    return [(m.role, "".join(t.pieces[m.start : m.end])) for m in messages_of(t)]


def test_turns_of_the_policy_are_numbered_and_all_tokens_are_there() -> None:
    t = rollout("3|1|>", "!1|3", "no|,", "!3|1")
    assert messages_of(t) == [
        MessageSpan("given", 0, 3), MessageSpan("policy", 3, 5, 1), MessageSpan("given", 5, 7, 1), MessageSpan("policy", 7, 9, 2)]


@pytest.mark.parametrize(("given", "expected"), [
    ("<|im_start|>|system|\n|be brief|<|im_end|>|\n|<|im_start|>|user|\n|hi|<|im_end|>|\n|<|im_start|>|assistant|\n", [
        ("system", "<|im_start|>system\nbe brief<|im_end|>\n"), ("user", "<|im_start|>user\nhi<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\n")]),
    ("<|begin|>|<|start_header_id|>|user|<|end_header_id|>|\n\n|hi", [
        ("given", "<|begin|>"), ("user", "<|start_header_id|>user<|end_header_id|>\n\nhi")]),
    ("user: |3+4|\n|assistant: ", [("user", "user: 3+4"), ("assistant", "\nassistant: ")]),
    ("<|im_start|>|user|\n|<tool_response>|7|</tool_response>", [("tool", "<|im_start|>user\n<tool_response>7</tool_response>")]),
    ("<|im_start|>|tool|\n|7", [("tool", "<|im_start|>tool\n7")]),
])
def test_the_marks_of_chat_templates_tell_who_spoke(given: str, expected: list[tuple[str, str]]) -> None:
    pieces = _split(given)
    t = KeptTrajectory(
        list(range(len(pieces))), [False] * len(pieces), [0.0] * len(pieces), [-1] * len(pieces), 1.0, text="".join(pieces),
        lengths=[len(p) for p in pieces])
    assert roles(t) == expected


def _split(text: str) -> list[str]:
    """Cut at "|" between tokens, but not at those within marks."""
    marked = text.replace("<|", "\0").replace("|>", "\1")
    return [piece.replace("\0", "<|").replace("\1", "|>") for piece in marked.split("|")]


def test_a_rollout_without_tokens_has_no_messages() -> None:
    assert messages_of(KeptTrajectory([], [], [], [], None)) == []
