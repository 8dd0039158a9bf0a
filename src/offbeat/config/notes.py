"""Notes on a valid configuration: settings that cannot act beside the others, and learning rates at which an adapter learns nothing.

Called by `offbeat config check`, and by each run at its start. Nothing is refused or changed. A setting counts as given where it differs
from its default, so that a file that names every default is not told of it.
"""

from collections.abc import Iterator

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.base import Part
from offbeat.config.critic import CriticConfig
from offbeat.config.objectives import OBJECTIVES, objective_of
from offbeat.config.preference import PreferenceConfig
from offbeat.config.rollout import RolloutConfig
from offbeat.config.root import Config
from offbeat.config.train import OptimizerConfig

LEAST_ADAPTER_LR = {"rl": 1e-5, "preference": 5e-6}
"""Learning rates below which an adapter hardly moves; a usual rank and scale need ten to a hundred times the rate of a whole model."""

_DEFAULT = AlgorithmConfig()


def notes(config: Config, part: Part) -> Iterator[str]:
    """Yield sentences on differences between a run of this part and a plain reading of its settings."""
    if part == "rl":
        yield from _adapter_rate(config, "rl", "train.optimizer.lr", config.train.optimizer)
        yield from idle_settings(config)
        if ratio := _idle_clip(config.algorithm):
            yield ratio
        yield from _quantised(config)
        yield from _cut_sampling(config)
    elif part == "preference":
        yield from _adapter_rate(config, "preference", "preference.optimizer.lr", config.preference.optimizer)
        for name in config.preference.losses if not config.preference.label_smoothing else ():
            if same := OBJECTIVES[name].unsmoothed:
                yield (f"preference.label_smoothing is 0, with which the loss {name} is {same}; give the share of pairs whose labels are"
                       " swapped")


def notes_of_check(config: Config) -> Iterator[str]:
    """Yield the notes of `config check`, which does not know the command: of RL, and of preference training if its section is used."""
    prefers = config.preference != PreferenceConfig()
    yield from notes(config, "preference") if prefers else ()
    for note in notes(config, "rl"):
        if not (prefers and "train.optimizer.lr" in note) and "clip range" not in note:
            yield note


def few_rows_note(rollout: RolloutConfig, *, num_rows: int | None) -> str:
    """Say that a step takes some prompts several times; "" if there are enough rows to train on, or endless ones (None)."""
    if num_rows is None or not 0 < num_rows < rollout.consumer_batch_size:
        return ""
    num_prompts = rollout.consumer_batch_size
    return (f"a step takes rollout.consumer_batch_size = {num_prompts} prompts and there are {num_rows} to train on, so each is drawn"
            f" {num_prompts / num_rows:.1f} times a step; with {num_rows} or fewer, steps are as varied and shorter")


def _adapter_rate(config: Config, part: str, name: str, optimizer: OptimizerConfig) -> Iterator[str]:
    least = LEAST_ADAPTER_LR[part]
    rank = config.model.lora.rank
    if rank and optimizer.lr != "auto" and optimizer.lr < least:
        yield (f"{name} = {optimizer.lr:g} suits the training of all weights, and an adapter (model.lora.rank = {rank}) would learn next to"
               f' nothing; {least:g} to {10 * least:g} is usual, and "auto" takes one for the model')


def _quantised(config: Config) -> Iterator[str]:
    """Say what the engines' form of the weights does to training, and what corrects for it."""
    form, base = config.inference.quantization, config.model.quantization
    if form == base == "none":
        return
    correction = correction_of(config.algorithm)
    if form == "none":
        what = f"the adapter is trained over weights rounded to {base} (model.quantization), and sampled over whole ones"
    else:
        what = (f"engines sample from weights rounded to {form} (inference.quantization), and so from another policy than the one that is"
                " trained")
    what += ", as policy/logprob_gap_mean shows;"
    yield f"{what} {correction} corrects for it" if correction else (
        f"{what} nothing corrects for it: leave algorithm.weight at 'mask', or set it to 'clamp' and algorithm.weight_high to 2")
    if config.weights.sends_changes and form != "none" and config.inference.kind.changes_in_place:
        how = "receives whole weights" if config.weights.channel == "collective" else "reads the last whole version and all changes since"
        yield (f"an engine with {form} weights keeps none that changes could be applied to (weights.whole_every_versions), and {how}")


def _cut_sampling(config: Config) -> Iterator[str]:
    """Say that the trainer normalises over other tokens than those that are drawn from."""
    rollout = config.rollout
    cuts = [f"rollout.{name} = {getattr(rollout, name):g}" for name, none in (("top_p", 1), ("top_k", 0)) if getattr(rollout, name) != none]
    if not cuts or config.replays_supports:
        return
    if not config.inference.kind.gives_supports:
        why = f"{config.inference.engine} does not return which tokens it drew from (model.support_replay)"
    elif config.algorithm.needs_teacher:
        why = "the teacher's log-probabilities are those among all tokens (model.support_replay)"
    else:
        why = "model.support_replay = 'off'"
    yield (f"{' and '.join(cuts)} leave{'s' * (len(cuts) == 1)} tokens out when engines sample, and the trainer normalises over all tokens,"
           f" since {why}; so each ratio to the policy that sampled is wrong by the probability of the tokens kept: sample from all tokens"
           " to avoid it")


def correction_of(algorithm: AlgorithmConfig) -> str:
    """Return what makes up for the difference of the policy that sampled from the one that is trained, with its bounds; "" if nothing."""
    bounds = f"{algorithm.weight_low:g} to {algorithm.weight_high:g}"
    if algorithm.weight != "none":
        return f"algorithm.weight = '{algorithm.weight}'" + (f" ({bounds})" if algorithm.weight != "ratio" else "")
    if algorithm.anchor == "rollout":
        return "the ratio to the policy that sampled (algorithm.anchor = 'rollout')"
    return "algorithm.filters" if algorithm.filters else ""


def clip_note(algorithm: AlgorithmConfig) -> str:
    """Say that no clip can act because the ratio is 1, and name the other limits of the update; "" where a clip can act."""
    if not algorithm.ratio_is_one:
        return ""
    limits = {"algorithm.weight": algorithm.weight != "none", "algorithm.filters": bool(algorithm.filters)}
    acting = [name for name, acts in limits.items() if acts]
    who = {0: "nothing limits", 1: f"{''.join(acting)} alone limits"}.get(len(acting), f"{' and '.join(acting)} limit")
    return ("each step updates the model once from its samples (algorithm.num_minibatches = 1), so the clip range has no effect;"
            f" {who} how far samples from an older version of the model can move it")


def _idle_clip(algorithm: AlgorithmConfig) -> str:
    """Return `clip_note` where a clip was given, or nothing else limits an update; else "", since only `config check` notes defaults."""
    given = any(getattr(algorithm, name) != getattr(_DEFAULT, name) for name in ("clip_low", "clip_high", "dual_clip"))
    unlimited = algorithm.weight == "none" and not algorithm.filters
    return clip_note(algorithm) if given or unlimited else ""


def idle_settings(config: Config) -> Iterator[str]:
    """Yield a sentence for each group of given settings of [algorithm], such as clip_low and clip_high, that nothing reads."""
    algorithm = config.algorithm
    for names, acts, why in _readers(algorithm):
        given = [name for name in names if getattr(algorithm, name) != getattr(_DEFAULT, name)]
        if given and not acts:
            yield f"{' and '.join(f'algorithm.{name}' for name in given)} {'has' if len(given) == 1 else 'have'} no effect {why}"
    if not algorithm.needs_critic and config.critic != CriticConfig():
        yield "[critic] has no effect without algorithm.centre = 'critic', as in the presets ppo and vapo"


def _readers(algorithm: AlgorithmConfig) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Yield settings, whether they can act, and why not."""
    has_critic, covers = algorithm.needs_critic, algorithm.cov_control
    yield (("clip_low", "clip_high"), bool(objective_of(algorithm.objective).bounds),
           f"with algorithm.objective = '{algorithm.objective}', which has no clip")
    yield (("weight_low", "weight_high"), algorithm.weight in ("clamp", "mask"),
           f"with algorithm.weight = '{algorithm.weight}', which has no bounds")
    yield ("weight_level",), algorithm.weight != "none", "with algorithm.weight = 'none'"
    yield (("centre", "scale"), not algorithm.credit, "with algorithm.credit, which gives the advantages")
    yield ("overlong_penalty",), algorithm.overlong_buffer_share > 0, "without algorithm.overlong_buffer_share"
    yield ("equal_rewards_tolerance", "max_draw_batches"), algorithm.dynamic_sampling, "without algorithm.dynamic_sampling"
    yield (("gae_lambda", "critic_lambda", "gae_length_alpha", "turn_level"), has_critic, "without algorithm.centre = 'critic'")
    yield ("gae_lambda",), not algorithm.gae_length_alpha, "with algorithm.gae_length_alpha, which sets it by length"
    yield ("state_weight",), algorithm.turn_credit == "state", "without algorithm.turn_credit = 'state'"
    yield (("imitate_above",), objective_of(algorithm.objective).imitates or algorithm.imitation_coefficient > 0,
           "without algorithm.objective = 'cross_entropy' or algorithm.imitation_coefficient")
    yield ("kl_coefficient",), algorithm.kl_loss != "none", "with algorithm.kl_loss = 'none'"
    yield ("kl_horizon",), algorithm.kl_target > 0, "without algorithm.kl_target"
    yield ("entropy_step",), algorithm.entropy_target > 0, "without algorithm.entropy_target"
    yield ("cov_share",), covers != "none", "with algorithm.cov_control = 'none'"
    yield ("cov_low", "cov_high"), covers == "clip", "without algorithm.cov_control = 'clip'"
    yield ("cov_coefficient",), covers == "kl", "without algorithm.cov_control = 'kl'"
    yield ("teacher_credit", "teacher_coefficient"), algorithm.needs_teacher, "with algorithm.teacher = 'none'"
    yield ("reference_refresh_steps",), algorithm.needs_reference, "without a term that compares with the reference"
    scaled = algorithm.scale != "none" or algorithm.whiten != "none"
    others = algorithm.reward_clip or algorithm.reward_kl or algorithm.has_penalties or algorithm.credit or algorithm.needs_critic
    yield (("reward_scale",), not scaled or bool(others),
           "where rewards are divided by their own size (algorithm.scale, algorithm.whiten); use train.optimizer.lr")
