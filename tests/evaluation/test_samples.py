"""How a played group becomes texts and rewards."""

import hashlib

import numpy as np

from evaluation.played import played
from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group, Trajectory
from offbeat.evaluation.samples import EpisodeTurn, EvaluatedPrompt, EvaluatedSample, read_group

TOKENIZER = character_tokenizer()


def trajectory(*pieces: tuple[str, bool], reward: object = 1.0, **fields: object) -> Trajectory:
    """A trajectory of texts, each given or written; an end token follows the last."""
    ids = [(token, written) for text, written in pieces for token in TOKENIZER.encode(text)] + [(TOKENIZER.eos_token_id, True)]
    tokens, mask = np.array([token for token, _ in ids]), np.array([written for _, written in ids])
    return Trajectory(tokens, mask, np.where(mask, -0.5, 0), np.where(mask, 0, -1), reward, **fields)


def test_one_answer_is_its_text_without_special_tokens() -> None:
    group = Group("batch:0", 0, (trajectory(("31>", False), ("13", True), reward={"form": 0.25, "right": 0.75}),))
    prompt = read_group(Row("31>", "13"), group, TOKENIZER)
    assert prompt.samples == (EvaluatedSample("13", 1.0, "stop", 3, {"form": 0.25, "right": 0.75}),)
    assert prompt.samples[0].is_right and not prompt.failed


def test_turns_tell_what_was_given_and_what_was_written() -> None:
    group = Group("batch:0", 0, (trajectory(("3+4?", False), ("8", True), (" no. ", False), ("7", True), reward=0.5),))
    [sample] = read_group(Row("3+4?", "7"), group, TOKENIZER).samples
    assert (sample.text, sample.num_tokens) == ("8\n7", 3)
    assert sample.turns == (EpisodeTurn("8", True), EpisodeTurn(" no. ", False), EpisodeTurn("7", True))


def test_agents_of_an_episode_have_their_rewards_and_its_reward_is_the_mean() -> None:
    both = [trajectory(("go", False), (text, True), reward=reward, episode=0, agent=agent)
            for agent, text, reward in (("x", "1", 1.0), ("o", "2", -1.0))]
    [sample] = read_group(Row("go", ""), Group("batch:0", 0, tuple(both)), TOKENIZER).samples
    assert (sample.reward, sample.by_agent, sample.rewards) == (0.0, {"x": 1.0, "o": -1.0}, {})
    assert sample.turns == (EpisodeTurn("1", True, "x"), EpisodeTurn("2", True, "o"))


def test_what_could_not_be_scored_keeps_its_text_and_the_reason() -> None:
    group = Group("batch:0", 0, (trajectory(("31>", False), ("x", True), reward=float("nan")),))
    prompt = read_group(Row("31>", "13"), group, TOKENIZER)
    [sample] = prompt.samples
    assert (sample.text, sample.reward) == ("x", None) and sample.reason.startswith("reward failed: ")
    assert prompt.failed and prompt.why_failed == sample.reason
    nothing = read_group(Row("31>", "13"), Group("batch:0", 0, rejected="timed out"), TOKENIZER)
    assert nothing == EvaluatedPrompt(Row("31>", "13"), (), "timed out") and nothing.failed and nothing.why_failed == "timed out"


def test_prompts_are_known_by_what_was_asked_and_what_is_right() -> None:
    chat = ({"role": "user", "content": "31>"},)
    keys = {EvaluatedPrompt(row).key for row in (Row("31>", "13"), Row("31>", "31"), Row(chat, "13"), Row("\ud800", "13"))}
    assert len(keys) == 4
    assert EvaluatedPrompt(Row("31>", "13", {"source": "a"})).key == EvaluatedPrompt(Row("31>", "13")).key


def test_the_same_question_about_two_pictures_is_two_prompts() -> None:
    one, other = (Row(f"{MARK}how many?", "3", images=(ImageSource(data=data),)) for data in (b"one", b"other"))
    first, second, again = (read_group(row, Group("batch:0", 0, rejected="timed out"), TOKENIZER) for row in (one, other, one))
    assert first.key == again.key != second.key
    assert first.images == (hashlib.sha256(b"one").hexdigest(),)


def test_missing_answers_count_as_wrong_in_the_means_of_prompts() -> None:
    answered = played([[1.0, 0.5], [None, 2.0], []], num_samples=2)
    assert answered.num_right.tolist() == [1, 1, 0] and answered.accuracies.tolist() == [0.5, 0.5, 0.0]
    assert answered.rewards.tolist() == [0.75, 1.0, 0.0] and answered.title == "held-out"
