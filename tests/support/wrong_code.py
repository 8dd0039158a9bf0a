"""User code that goes wrong, for the table of `tests/faults/user_code.py`: rewards, workflows and filters.

A reward goes wrong on one completion in ten, or in twenty where that costs its process; it goes by the text alone, so that a second try of
the same completion fails alike. A workflow goes wrong on one of its samples, or on its group, in one group of eight.
"""

import asyncio
import ctypes
import itertools
import os
import signal
import time
import zlib
from dataclasses import replace
from functools import partial

import numpy as np

from offbeat.rollout.workflows.single_turn import single_turn

CALLS = itertools.count()
VOCAB_SIZE = 54
TURNS = 20


def unlucky(text, share):
    return zlib.crc32(text.encode()) % share == 0


def fair(completion):
    return float(sum(map(ord, completion)) % 3) / 2


# -- rewards ---------------------------------------------------------------------------------------------------------------------------


class Unspeakable(Exception):  # noqa: N818
    def __str__(self):
        raise RuntimeError("no text")


def fail(error):
    raise error


def recurse(n=0):
    return recurse(n + 1)


def shout():
    print("x" * 10**7)
    raise ValueError("x" * 10**7)


def stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


async def later():
    return 1.0


REWARDS = {
    "raises": lambda: fail(ValueError("no number in it")),
    "raises_unspeakably": lambda: fail(Unspeakable()),
    "raises_half_a_character": lambda: fail(KeyError("\ud800")),
    "exits": lambda: fail(SystemExit(3)),
    "interrupts": lambda: fail(KeyboardInterrupt()),
    "ends_its_process": lambda: os._exit(3),
    "kills_its_process": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stops_its_process": stop_oneself,
    "crashes": lambda: ctypes.string_at(0),
    "hangs": lambda: time.sleep(60),
    "calls_itself": recurse,
    "wants_a_petabyte": lambda: bytearray(10**15),
    "shouts": shout,
    "gives_none": lambda: None,
    "gives_text": lambda: "0.7",
    "gives_a_list": lambda: [1.0],
    "gives_an_array": lambda: np.ones(1),
    "gives_text_in_an_array": lambda: np.array("0.7"),
    "gives_a_complex_number": lambda: 1j,
    "gives_nan": lambda: float("nan"),
    "gives_inf": lambda: float("inf"),
    "gives_1e308": lambda: 1e308,
    "gives_an_endless_integer": lambda: 10**400,
    "gives_a_coroutine": later,
}


COSTLY = ("ends_its_process", "kills_its_process", "stops_its_process", "crashes", "hangs")


def _reward(name):
    share = 20 if name in COSTLY else 10

    def reward(completion, row):
        return REWARDS[name]() if unlucky(completion, share) else fair(completion)

    return reward


globals().update({f"reward_{name}": _reward(name) for name in REWARDS})


def reward_gives_any_number(completion, row):
    return [True, 1, np.float32(0.5), np.array(0.25)][zlib.crc32(completion.encode()) % 4]


def reward_fair(completion, row):
    return fair(completion)


def reward_always_raises(completion, row):
    return fair(completion) if completion == row.answer else fail(ValueError("no number in it"))


def reward_raises_on_some_prompts(completion, row):
    """All of a prompt that begins with 1."""
    return fail(ValueError("a prompt with 1")) if str(row.prompt).startswith("1") and completion != row.answer else fair(completion)


def reward_raises_at_once(completion, row):
    raise ValueError("no number in it")


# -- workflows: what becomes of one sample ---------------------------------------------------------------------------------------------


def put(name, value, at=-1):
    """Another value at one place of an array."""
    def change(t):
        values = getattr(t, name).astype(np.float64 if name == "rollout_logprobs" else np.int64)
        values[at] = value
        return replace(t, **{name: values})

    return change


def longer(t):
    """So many turns that no micro-batch takes it."""
    names = ("tokens", "loss_mask", "rollout_logprobs", "versions")
    return replace(t, **{name: np.concatenate([getattr(t, name)] * TURNS) for name in names})


def without_prompt(t):
    return replace(t, **{name: getattr(t, name)[t.prompt_len:] for name in ("tokens", "loss_mask", "rollout_logprobs", "versions")})


SAMPLES = {
    "token_outside_the_vocabulary": put("tokens", VOCAB_SIZE),
    "negative_token": put("tokens", -1),
    "token_of_33_bits": put("tokens", 2**32 + 5),
    "prompt_outside_the_vocabulary": put("tokens", 10**6, at=0),
    "text_for_tokens": lambda t: replace(t, tokens=list("answer")),
    "fractions_for_tokens": lambda t: replace(t, tokens=t.tokens + 0.5),
    "logprob_nan": put("rollout_logprobs", np.nan),
    "logprob_minus_infinity": put("rollout_logprobs", -np.inf),
    "probabilities_for_logprobs": lambda t: replace(t, rollout_logprobs=np.exp(t.rollout_logprobs)),
    "logprobs_all_0": lambda t: replace(t, rollout_logprobs=t.rollout_logprobs * 0),
    "logprobs_of_another_length": lambda t: replace(t, rollout_logprobs=t.rollout_logprobs[1:]),
    "version_of_the_future": put("versions", 10**6),
    "version_of_long_ago": lambda t: replace(t, versions=np.where(t.loss_mask, t.versions - 38, -1)),
    "version_of_a_prompt": put("versions", -1),
    "reward_text": lambda t: replace(t, reward="good"),
    "reward_none": lambda t: replace(t, reward=None),
    "reward_1e308": lambda t: replace(t, reward=1e308),
    "reason_none": lambda t: replace(t, reason=None),
    "no_prompt": without_prompt,
    "no_tokens": lambda t: replace(t, tokens=[], loss_mask=[], rollout_logprobs=[], versions=[]),
    "too_long": longer,
    "text_for_a_trajectory": lambda t: "answer",
    "none_for_a_trajectory": lambda t: None,
}


def _spoil(name):
    async def workflow(episode):
        group = await single_turn(episode)
        if next(CALLS) % 8 == 3:
            at = next(CALLS) % len(group)
            group[at] = SAMPLES[name](group[at])
        return group

    return workflow


globals().update({f"sample_{name}": _spoil(name) for name in SAMPLES})

# -- workflows: what becomes of a group ------------------------------------------------------------------------------------------------


async def cancel_oneself(_episode):
    inner = asyncio.ensure_future(asyncio.sleep(10))
    inner.cancel()
    await inner


async def ask_for_nonsense(episode):
    await episode.generate((10**6,), episode.sampling, n=1)


async def ask_for_too_much(episode):
    await episode.generate(episode.prompt * TURNS, episode.sampling, n=1)


async def score_nothing(episode):
    await episode.score([None], episode.row)


async def fail_in_a_task_group(episode):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask_for_nonsense(episode))
        tasks.create_task(asyncio.sleep(10))


async def give(value, _episode):
    return value


async def give_fewer(episode):
    return (await single_turn(episode))[1:]


async def give_more(episode):
    return (await single_turn(episode)) * 2


async def hang(_episode):
    await asyncio.sleep(60)


async def block(_episode):
    block_here()


def block_here():
    time.sleep(60)


async def block_and_catch(_episode):
    for _ in range(2):
        try:
            block_here()
        except Exception:
            continue


async def raise_(error, _episode):
    raise error


GROUPS = {
    "raises": partial(raise_, KeyError("turns")),
    "raises_unspeakably": partial(raise_, Unspeakable()),
    "raises_half_a_character": partial(raise_, KeyError("\ud800")),
    "exits": partial(raise_, SystemExit(3)),
    "raises_in_a_task_group": fail_in_a_task_group,
    "cancels_itself": cancel_oneself,
    "hangs": hang,
    "blocks": block,
    "blocks_once_more": block_and_catch,
    "gives_none": partial(give, None),
    "gives_text": partial(give, "answer"),
    "gives_an_empty_list": partial(give, []),
    "gives_fewer": give_fewer,
    "gives_more": give_more,
    "asks_for_nonsense": ask_for_nonsense,
    "asks_for_too_much": ask_for_too_much,
    "scores_nothing": score_nothing,
}


def _fail(name):
    async def workflow(episode):
        return await (GROUPS[name](episode) if next(CALLS) % 8 == 3 else single_turn(episode))

    return workflow


globals().update({f"group_{name}": _fail(name) for name in GROUPS})


def workflow_not_async(episode):
    return []


async def workflow_generator(episode):
    yield episode


async def workflow_of_two_arguments(episode, row):
    return await single_turn(episode)


# -- filters ---------------------------------------------------------------------------------------------------------------------------


def write_into(group):
    group.trajectories[0].tokens[:] = 10**6
    return True


FILTERS = {
    "raises": lambda group: fail(KeyError("score")),
    "exits": lambda group: fail(SystemExit(3)),
    "gives_none": lambda group: None,
    "gives_an_array": lambda group: np.ones(len(group.trajectories)),
    "writes_into_tokens": write_into,
}


def _filter(name):
    return lambda group: FILTERS[name](group) if next(CALLS) % 8 == 3 else True


globals().update({f"filter_{name}": _filter(name) for name in FILTERS})
