"""What running samples have so far, as clients read it."""

from offbeat.engine.request import Output
from offbeat.engine.running_samples import complete_requests, write_running
from offbeat.inference.dialects.completions import read_running


def sample(index: int, tokens: list[int], reason: str | None = None) -> Output:
    return Output(index, tokens, [-float(token) for token in tokens], [4] * len(tokens), reason)


def test_samples_that_run_and_those_that_have_ended_come_in_order_with_the_tokens_that_are_new():
    have = {"r1": [0, 3, 1]}
    told = complete_requests(have, {"r1": [sample(2, [8, 9]), sample(0, [5])]}, {"r1": [sample(1, [1, 2, 3, 4, 0], "stop")]})
    assert [output.token_ids for output in told["r1"]] == [[5], [4, 0], [8, 9]]
    (samples,) = read_running(write_running(have, told)).values()
    assert [(each.first, *map(list, each.columns())) for each in samples] == [
        (0, [5], [-5.0], [4]), (3, [4, 0], [-4.0, 0.0], [4, 4]), (1, [8, 9], [-8.0, -9.0], [4, 4])]


def test_a_request_of_which_a_sample_is_missing_is_left_out():
    assert complete_requests({"r1": [0, 0]}, {"r1": [sample(0, [5])]}, {}) == {}
    assert complete_requests({"r1": [0]}, {}, {}) == {}


def test_samples_beyond_those_that_the_client_counts_are_left_out():
    told = complete_requests({"r1": [0]}, {"r1": [sample(0, [5])]}, {"r1": [sample(1, [6], "stop")]})
    assert [output.token_ids for output in told["r1"]] == [[5]]
