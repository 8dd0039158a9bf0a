"""What a rank of SPMD mode draws and rolls out."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.controller.inputs import read_inputs
from offbeat.data.dataset import ListDataset
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.errors import ConfigError, DataError
from offbeat.runs.rank_info import RankInfo
from offbeat.spmd.rollouts import NoRolloutSource, share_limits, share_rows
from small_run import small_config

SPMD = {"run__mode": "spmd", "rollout__single_rank_load": "false", "rollout__balance_batch": "false"}


def test_limits_are_divided_by_the_number_of_heads_and_their_sum_stays(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, rollout__consumer_batch_size="7", rollout__max_concurrent_rollouts="3", sft__batch_size="10", **SPMD)
    shares = [config.model_copy(update=share_limits(config.rollout, config.sft, RankInfo(rank, 4))) for rank in range(4)]
    assert [share.rollout.consumer_batch_size for share in shares] == [2, 2, 2, 1]
    assert [share.rollout.max_concurrent_rollouts for share in shares] == [1, 1, 1, 1]
    assert [share.sft.batch_size for share in shares] == [3, 3, 2, 2]


def test_a_batch_smaller_than_the_number_of_heads_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, rollout__consumer_batch_size="3", **SPMD)
    with pytest.raises(ConfigError, match="rollout.consumer_batch_size must be at least the number of ranks = 4 .* got 3; raise it"):
        share_limits(config.rollout, config.sft, RankInfo(0, 4))


def test_heads_draw_every_row_once_and_none_twice(tmp_path: Path, model_dir: str) -> None:
    inputs = replace(read_inputs(small_config(tmp_path, model_dir)), train=ListDataset(tuple(Row(f"{i}>", str(i)) for i in range(7))))
    drawn = []
    for rank in range(3):
        share = share_rows(inputs, RankInfo(rank, 3)).train
        stream = PromptStream(share, seed=0)
        drawn += [stream.next()[1].prompt for _ in range(share.num_rows or 0)]
    assert sorted(drawn) == [f"{i}>" for i in range(7)]


def test_fewer_rows_than_heads_are_refused(tmp_path: Path, model_dir: str) -> None:
    inputs = replace(read_inputs(small_config(tmp_path, model_dir)), train=ListDataset((Row("0>", "0"),)))
    with pytest.raises(DataError, match="has 1 rows to train on, fewer than the 2 ranks"):
        share_rows(inputs, RankInfo(1, 2))


def test_heads_of_an_endless_task_draw_different_rows(tmp_path: Path, model_dir: str) -> None:
    inputs = read_inputs(small_config(tmp_path, model_dir))
    rows = [[share_rows(inputs, RankInfo(rank, 2)).train.row(i) for i in range(3)] for rank in range(2)]
    assert [rows[i % 2][i // 2] for i in range(6)] == [inputs.train.row(i) for i in range(6)]


def test_a_bystander_draws_nothing(tmp_path: Path, model_dir: str) -> None:
    inputs = read_inputs(small_config(tmp_path, model_dir))
    source = NoRolloutSource(inputs)
    stream = PromptStream(inputs.train, seed=0)
    assert len(source.sft_batch(stream, 5)) == 0

    async def play() -> None:
        async with source.rollouts(stream, version=0, last_version=2) as rollouts:
            assert await rollouts.prepare_batch() == []
            assert await rollouts.take_ahead() == [] and rollouts.has_ahead
            rollouts.advance(1)
            rollouts.serve(1)
            assert (rollouts.sampling, rollouts.take_stats().names) == (inputs.sampling, [])
            assert rollouts.in_flight == ()

    asyncio.run(play())
    assert stream.state().position == 0
