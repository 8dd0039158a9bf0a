"""Credit functions for tests of `offbeat.algorithms.own_credit`: some that work, and some that do not. Without torch."""

import numpy as np

from offbeat.algorithms.own_credit import SampleGroups


def centred(groups: SampleGroups, constants: dict) -> np.ndarray:
    return groups.rewards - groups.mean(groups.rewards)


def later_turns_less(groups, constants):
    return [reward * constants["decay"] ** turns for reward, turns in zip(centred(groups, constants), groups.turns, strict=True)]


def right_alone(groups, constants):
    return list(np.nan_to_num(groups.named_rewards["right"]))


def by_version(groups, constants):
    return [versions.astype(float) for versions in groups.versions]


def too_few(groups, constants):
    return groups.rewards[:2]


def too_short(groups, constants):
    return [np.zeros(max(length - 1, 0)) for length in groups.lengths]


def endless(groups, constants):
    with np.errstate(divide="ignore"):
        return 1 / (groups.rewards - groups.rewards.max())


def text(groups, constants):
    return "ones"


def nothing(groups, constants):
    return None


def raises(groups, constants):
    return groups.rewards * constants["missing"]


def imports_torch(groups, constants):
    import torch  # noqa: PLC0415

    return torch.from_numpy(groups.rewards).numpy()


def by_turn_reward(groups, constants):
    return [rewards[turns] for rewards, turns in zip(groups.turn_rewards, groups.turns, strict=True)]


def in_the_shop(groups, constants):
    return [np.array([float(states[turn] == "shop") for turn in turns]) for states, turns in zip(groups.states, groups.turns, strict=True)]
