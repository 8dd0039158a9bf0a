"""What is known of running samples: tokens are added once, and those that an engine has not proven are not counted."""

import sys
from dataclasses import dataclass

import numpy as np

from offbeat.inference.hearing import Hearing, KnownSample


@dataclass
class Engine:
    version: int | None


def sample(*versions: int) -> KnownSample:
    numbers = list(range(len(versions)))
    return KnownSample(numbers, [-1.0 * each for each in numbers], list(versions))


def test_tokens_that_are_known_are_not_added_again_and_none_is_left_out() -> None:
    heard = sample(3, 3, 3)
    heard.hear(1, [1, 2, 7, 8], [-1.0, -2.0, -7.0, -8.0], [3, 3, 3, 4])
    heard.hear(0, [0, 1], [0.0, -1.0], [3, 3])
    heard.hear(6, [9], [-9.0], [4])  # what is between is not known
    assert [column.tolist() for column in heard.columns()] == [[0, 1, 2, 7, 8], [-0.0, -1.0, -2.0, -7.0, -8.0], [3, 3, 3, 3, 4]]
    assert [column.tolist() for column in heard.columns(3, 4)] == [[7], [-7.0], [3]]


def test_a_known_token_takes_twelve_bytes() -> None:
    numbers = np.arange(10_000)
    heard = KnownSample(numbers, numbers, numbers)
    heard.hear(9_999, numbers[:2].tolist(), numbers[:2].tolist(), numbers[:2].tolist())
    assert len(heard.tokens) == 10_001
    assert sum(sys.getsizeof(column) for column in (heard.tokens, heard.logprobs, heard.versions)) < 1.2 * 12 * 10_001


def test_tokens_count_up_to_the_version_that_their_engine_has_proven() -> None:
    engine = Engine(3)
    hearing = Hearing(1.0, [sample(3, 3, 4, 4), sample(), sample(2)])
    assert [hearing.num_proven(each) for each in hearing.samples] == [4, 0, 1]  # of an adapter
    hearing.engine = engine
    assert [hearing.num_proven(each) for each in hearing.samples] == [2, 0, 1]
    engine.version = 4
    assert hearing.num_proven(hearing.samples[0]) == 4
    engine.version = None
    assert hearing.num_proven(hearing.samples[0]) == 0


def test_what_an_engine_has_not_proven_is_forgotten_when_it_fails_or_one_with_older_weights_goes_on() -> None:
    hearing = Hearing(1.0, [sample(3, 3, 4, 5), sample(5)], engine=Engine(4))
    hearing.samples[0].num_recorded = 3
    hearing.engine_failed()
    assert hearing.engine is None and [each.versions.tolist() for each in hearing.samples] == [[3, 3, 4], []]
    hearing.go_on_at(Engine(3))
    assert hearing.samples[0].tokens.tolist() == [0, 1] and hearing.samples[0].num_recorded == 2 and hearing.num_tokens == 2


def test_a_request_for_a_sample_that_has_begun_goes_on_after_its_tokens() -> None:
    hearing = Hearing(2.0, [sample(1, 1), sample()])
    first, both = hearing.request(hearing.samples[0], version=None), hearing.request(*hearing.samples[1:], version=4)
    assert (first.num_begun, first.version, first.every_s, first.samples) == (2, None, 2.0, hearing.samples[:1])
    assert (both.num_begun, both.version) == (0, 4) and first.name != both.name
