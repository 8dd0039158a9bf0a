"""Running samples as columns, checked against plain lists."""

import numpy as np
import torch

from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.request import Request, SamplingParams
from offbeat.engine.rows import Rows
from offbeat.engine.sampler import Drawn

TOKENIZER = character_tokenizer()
CPU = torch.device("cpu")


def add(
    rows: Rows, name: str, prompt: list[int], *, n: int = 1, adapter: str = "", stream: bool = False, stop_ids: tuple[int, ...] = (0,),
    **params,
) -> None:
    sampling = SamplingParams(stop_token_ids=stop_ids, ignore_eos=True, **params)
    request = Request(id=name, prompt=prompt, params=sampling, n=n, adapter=adapter, stream=stream)
    rows.add(request, keys=np.arange(n, dtype=np.uint64), tokenizer=TOKENIZER)


def append(rows: Rows, tokens: list[int], *, version: int = 0) -> tuple[list[bool], list[bool]]:
    drawn = Drawn(np.array(tokens), np.full(len(tokens), -0.5, np.float32), np.ones(len(tokens), bool))
    stopped, full = rows.append(drawn, version=version)
    return stopped.tolist(), full.tolist()


def test_samples_collect_their_tokens_with_versions_until_they_stop_or_are_full() -> None:
    rows = Rows(max_rows=4, device=CPU)
    add(rows, "a", [5, 6, 7], n=2, max_new_tokens=2)
    add(rows, "b", [8], max_new_tokens=400, stop_ids=(0, 9))
    assert len(rows) == 3
    assert rows.last_tokens(3).tolist() == [7, 7, 8]
    assert append(rows, [10, 0, 11], version=1) == ([False, True, False], [False, False, False])
    assert append(rows, [12, 13, 9], version=2) == ([False, False, True], [True, True, False])
    first, last = rows.output(0, "length"), rows.output(2, "stop")
    assert (first.token_ids, first.logprobs, first.versions, first.finish_reason) == ([10, 12], [-0.5, -0.5], [1, 2], "length")
    assert (last.index, last.token_ids) == (0, [11, 9])
    assert rows.cached_tokens(0).tolist() == [5, 6, 7, 10]


def test_a_streaming_request_hears_of_each_token_once() -> None:
    rows = Rows(max_rows=2, device=CPU)
    add(rows, "a", [5], stream=True, max_new_tokens=3)
    add(rows, "b", [5], max_new_tokens=3)
    assert rows.watched() == [0]
    append(rows, [10, 10])
    assert rows.output(0, None).token_ids == [10]
    append(rows, [11, 11])
    append(rows, [12, 12])
    assert rows.output(0, "length").token_ids == [11, 12]
    assert rows.output(1, "length").token_ids == [10, 11, 12]


def test_sampling_parameters_follow_their_rows() -> None:
    rows = Rows(max_rows=3, device=CPU)
    add(rows, "a", [5], temperature=0.5)
    add(rows, "b", [5], n=2, top_p=0.25, top_k=3)
    sampling = rows.sampling()
    assert sampling.scale is not None and sampling.scale.ravel().tolist() == [0.5, 1, 1]
    assert list(sampling.restricted) == [1, 2]
    uniforms = rows.uniforms()
    assert uniforms.shape == (3,) and ((uniforms >= 0) & (uniforms < 1)).all()


def test_adapters_follow_their_rows() -> None:
    rows = Rows(max_rows=4, device=CPU)
    add(rows, "a", [5], n=2, adapter="t@1")
    add(rows, "b", [5])
    assert rows.adapters() == ("t@1", "t@1", "")
    rows.compact([2], [0], running=2)
    assert rows.adapters() == ("", "t@1")


def test_the_likeliest_tokens_follow_their_rows_and_leave_out_what_cannot_be_drawn() -> None:
    rows = Rows(max_rows=4, device=CPU)
    add(rows, "a", [5])
    add(rows, "b", [5], top_logprobs=1)
    add(rows, "c", [5], top_logprobs=3, stream=True)
    assert rows.sampling().top is not None and rows.sampling().num_top == 3
    for _ in range(2):
        tops = np.array([[7, 8, 9], [7, 8, 9]]), np.array([[-0.1, -1.0, -2.0], [-0.1, -1.0, -np.inf]], np.float32)
        rows.append(Drawn(np.array([10, 10, 10]), np.zeros(3, np.float32), np.ones(3, bool), *tops), version=0)
    two = rows.output(2, None).top_logprobs
    assert two is not None and [[token for token, _ in row] for row in two] == [[7, 8]] * 2
    rows.compact([2], [0], running=2)
    assert rows.output(0, None).top_logprobs == []  # it has been told of both
    one = rows.output(1, "length").top_logprobs
    assert one is not None and [[token for token, _ in row] for row in one] == [[7]] * 2
