"""Rules of processes and devices: how ranks compute, how weights reach engines, and which processes share a device.

Called by `config.root`. Each function raises ValueError for settings that contradict each other.
"""

from offbeat.config.base import shown
from offbeat.config.cluster import ClusterConfig
from offbeat.config.engine_kinds import kinds_that, kinds_with_form
from offbeat.config.inference import InferenceConfig
from offbeat.config.model import ModelConfig
from offbeat.config.rollout import RolloutConfig
from offbeat.config.run import RunConfig
from offbeat.config.train import TrainConfig
from offbeat.config.weights import WeightsConfig


def check_engines(inference: InferenceConfig) -> None:
    """Check how many engines there are, and that they can do what is asked of them."""
    name, num_engines = ("urls", len(inference.urls)) if inference.urls else ("num_engines", inference.num_engines)
    if inference.batch_invariant is True and not inference.kind.batch_invariant:
        raise ValueError(
            f"inference.batch_invariant must be false or 'auto' with inference.engine = '{inference.engine}', got true; only"
            f" {kinds_that('batch_invariant')} computes a token to the same bits in every batch")
    if inference.min_engines > num_engines:
        raise ValueError(f"inference.min_engines must be <= the {num_engines} of inference.{name}, got {inference.min_engines}")


def check_routes(model: ModelConfig, *, inference: InferenceConfig, weights: WeightsConfig, num_minibatches: int) -> None:
    """Check that there are the experts that are to be replayed."""
    if model.route_replay == "rollout" and not inference.kind.gives_routes:
        raise ValueError(
            f"model.route_replay must not be 'rollout' with inference.engine = '{inference.engine}', got it; only"
            f" {kinds_that('gives_routes')} returns the experts that each token used, so choose 'off', or 'old_policy'")
    if model.route_replay == "rollout" and not inference.urls:
        _check_route_engines(inference, weights)
    if model.route_replay == "old_policy" and num_minibatches == 1:
        raise ValueError(
            "model.route_replay must not be 'old_policy' with algorithm.num_minibatches = 1, got it; the only update of a step begins at"
            " the old policy, whose experts are its own, so leave it out")


def _check_route_engines(inference: InferenceConfig, weights: WeightsConfig) -> None:
    """Check that the engines that the run starts are such that they can return routes."""
    refused, name = "model.route_replay must not be 'rollout' with inference.engine =", inference.engine
    if inference.kind.routes_need_devices and not inference.devices_per_engine:
        raise ValueError(
            f"{refused} '{name}' and inference.devices_per_engine = 0, got it; {name} returns the experts that each token used on"
            " accelerators only, so choose 'off', 'old_policy', or the embedded engine")
    if inference.kind.routes_need_prefixes and (not inference.prefix_caching or weights.interrupt == "keep"):
        setting = "weights.interrupt = 'keep'" if inference.prefix_caching else "inference.prefix_caching = false"
        raise ValueError(
            f"{refused} '{name}' and {setting}, got it; {name} returns the experts that each token used only if it caches prefixes, so"
            " change one of both")


def check_supports(model: ModelConfig, *, inference: InferenceConfig, needs_teacher: bool) -> None:
    """Check that there are the supports that are to be replayed, and that nothing scores over other tokens."""
    if model.support_replay != "rollout":
        return
    if not inference.kind.gives_supports:
        raise ValueError(
            f"model.support_replay must not be 'rollout' with inference.engine = '{inference.engine}', got it; only"
            f" {kinds_that('gives_supports')} returns the tokens among which each token was drawn, so choose 'auto' or 'off'")
    if needs_teacher:
        raise ValueError(
            "model.support_replay must not be 'rollout' with algorithm.teacher, got it; a teacher's log-probabilities are those among all"
            " tokens, and only equal supports can be compared, so choose 'auto' or 'off'")


def check_quantization(inference: InferenceConfig, *, model: ModelConfig) -> None:
    """Check that the engines compute with weights in the form that is asked for."""
    name, form = inference.quantization, inference.form
    if name == "none":
        return
    for met, setting, instead in (
        (form is None, f"inference.engine = '{inference.engine}'",
         f"it is for {kinds_with_form(name)}; a server's own form is given in inference.arguments"),
        (bool(inference.urls), "inference.urls", "start those engines in that form, and set weights.proof_tolerance"),
        (form is not None and not form.on_devices and inference.devices_per_engine > 0,
         f"inference.devices_per_engine = {inference.devices_per_engine}", "it is for engines on CPUs"),
        (inference.kind.inside and inference.forward == "hf", "inference.forward = 'hf'", "only the fast path computes with it"),
    ):
        if met:
            raise ValueError(f"inference.quantization must be 'none' with {setting}, got '{name}'; {instead}")
    assert form is not None, "it was refused"
    if model.dtype not in ("auto", *form.formats):
        raise ValueError(
            f"model.dtype must be '{form.formats[0]}' or 'auto' with inference.quantization = '{name}', got '{model.dtype}';"
            f" {inference.engine} makes that form of no other")


def check_step(train: TrainConfig, *, model: ModelConfig) -> None:
    """Check a training step's compilation and recomputation."""
    if model.lora.rank and train.recomputes == "selective":
        raise ValueError(
            "train.gradient_checkpointing must be 'off' or 'full' with model.lora.rank > 0, got 'selective'; adapters add to the"
            " results of matrix products in place, so none can be kept")
    if train.compile and train.recomputes != "off":
        raise ValueError(
            f"train.gradient_checkpointing must be 'off' with train.compile, got '{train.recomputes}'; torch leaves"
            " layers that it computes again uncompiled")
    if model.lora.rank and train.compile:
        raise ValueError(
            "train.compile must be false with model.lora.rank > 0, got true; layers with adapters cannot be compiled, so leave it out")


def check_channel(weights: WeightsConfig, *, model: ModelConfig, inference: InferenceConfig) -> None:
    """Check how weights reach engines."""
    if weights.sends_changes:
        for name, value, refused in (
            ("model.lora.rank", model.lora.rank, model.lora.rank > 0),
            ("inference.engine", inference.engine, not inference.kind.takes_changes),
        ):
            if refused:
                raise ValueError(
                    f"weights.whole_every_versions must be 1 with {name} = {shown(value)}, got {weights.whole_every_versions};"
                    f" only {kinds_that('takes_changes')} take changes of weights, and adapters are small")
    if weights.channel == "collective" and not inference.kind.takes_broadcasts:
        raise ValueError(
            f"weights.channel must be 'disk' with inference.engine = '{inference.engine}', got 'collective'; a folder in /dev/shm"
            " (weights.dir) is the fast way on one machine")


def check_devices(cluster: ClusterConfig, *, inference: InferenceConfig) -> None:
    """Check how many devices an engine has, and whether it may share them."""
    if inference.devices_per_engine > 1 and not inference.kind.splits:
        raise ValueError(
            f"inference.devices_per_engine must be at most 1 with inference.engine = '{inference.engine}', got"
            f" {inference.devices_per_engine}; use {kinds_that('splits')}, which split a model over devices, or more engines")
    if cluster.share_devices and cluster.launcher == "ray":
        raise ValueError(
            "cluster.share_devices must be false with cluster.launcher = 'ray', got true; Ray gives every process devices of its own")


def check_turns(cluster: ClusterConfig, *, rollout: RolloutConfig, inference: InferenceConfig, weights: WeightsConfig) -> None:
    """Check settings of engines and ranks that take turns on their devices."""
    if not cluster.take_turns:
        return
    for met, name, why in (
        (cluster.launcher == "ray", "cluster.launcher = 'ray'", "Ray gives every process devices of its own"),
        (bool(inference.urls), "inference.urls", "only engines that the run has started share its devices"),
        (not inference.kind.sleeps, f"inference.engine = '{inference.engine}'", f"{kinds_that('sleeps')} can be put to sleep"),
        (not rollout.single_rank_load, "rollout.single_rank_load = false", "ranks would wait for rollouts of sleeping engines"),
        (weights.interrupt != "recompute", f"weights.interrupt = '{weights.interrupt}'",
         "an engine that has slept has no cache to go on with, so leave it at 'recompute'"),
    ):
        if met:
            raise ValueError(f"cluster.take_turns must be false with {name}, got true; {why}")


def check_adapter(model: ModelConfig, *, run: RunConfig, train: TrainConfig, rollout: RolloutConfig, inference: InferenceConfig) -> None:
    """Check settings for training and serving an adapter."""
    for met, name, why in (
        (not model.lora.rank, "model.lora.rank = 0", "only weights that are frozen beside an adapter are rounded"),
        (train.parallel.shard > 1, f"train.parallel.shard = {train.parallel.shard}", "each rank holds all rounded weights"),
        (train.parallel.tp > 1, f"train.parallel.tp = {train.parallel.tp}", "each rank holds all rounded weights"),
        (train.parallel.ep > 1, f"train.parallel.ep = {train.parallel.ep}", "each rank holds all rounded weights"),
    ):
        if met and model.quantization != "none":
            raise ValueError(f"model.quantization must be 'none' with {name}, got '{model.quantization}'; {why}")
    for met, name, why in (
        (train.parallel.tp > 1, f"train.parallel.tp = {train.parallel.tp}", "ranks would divide the experts"),
        (train.parallel.ep > 1, f"train.parallel.ep = {train.parallel.ep}", "ranks would divide the experts"),
        (model.lora.dropout > 0, f"model.lora.dropout = {model.lora.dropout:g}", "PEFT's form of such adapters has none"),
        (not inference.kind.adapts_experts, f"inference.engine = '{inference.engine}'",
         f"only {kinds_that('adapts_experts')} serves adapters of experts"),
    ):
        if met and model.lora.rank and "experts" in model.lora.targets:
            raise ValueError(f"model.lora.targets must not have 'experts' with {name}, got {list(model.lora.targets)}; {why}")
    if model.lora.rank and train.offload_optimizer:
        raise ValueError(
            "train.offload_optimizer must be false with model.lora.rank > 0, got true; an adapter's moments are small, so leave it out")
    if model.lora.rank and "router" in train.freeze:
        raise ValueError(
            'train.freeze must not name "router" with model.lora.rank > 0, got it; an adapter trains no routers, so leave it out')
    if train.router_aux_loss_coefficient and "router" in train.freeze:
        raise ValueError(
            'train.freeze must not name "router" with train.router_aux_loss_coefficient > 0, which trains routers, got it; leave one of'
            " them out")
    if model.lora.dropout and train.router_aux_loss_coefficient:
        raise ValueError(
            f"model.lora.dropout must be 0 with train.router_aux_loss_coefficient > 0, got {model.lora.dropout:g}; routers choose otherwise"
            " where an adapter's inputs are dropped, so leave one of them out")
    if model.lora.rank and not rollout.single_rank_load:
        raise ValueError(
            "rollout.single_rank_load must be true with model.lora.rank > 0, got false; one process routes to the engines that hold an"
            " adapter, so leave it out")
    if model.lora.rank and run.warm_up and not model.path and run.mode == "spmd":
        raise ValueError(
            "run.warm_up must be false with model.lora.rank > 0, no model.path and run.mode = 'spmd', got true; make the base with"
            " `offbeat sft` first, and give its export as model.path")
    if model.lora.rank > inference.max_adapter_rank:
        raise ValueError(f"model.lora.rank must be <= inference.max_adapter_rank = {inference.max_adapter_rank}, got {model.lora.rank}")


def check_parallel(train: TrainConfig, *, run: RunConfig, rollout: RolloutConfig) -> None:
    """Check how ranks divide a model and its rows among them."""
    parallel = train.parallel
    known = run.mode == "controller" or train.num_ranks > 1  # in SPMD mode, torchrun says how many there are
    num_replicas = parallel.num_replicas(train.num_ranks) if known else 0
    if parallel.tp > 1 and parallel.ep not in (1, parallel.tp):
        raise ValueError(
            f"train.parallel.ep must be 1 or equal train.parallel.tp = {parallel.tp}, got {parallel.ep}; experts are divided among the"
            " ranks that compute the same rows")
    if parallel.spreads_experts and parallel.cp > 1:
        raise ValueError(
            f"train.parallel.ep must be 1 with train.parallel.cp = {parallel.cp}, got {parallel.ep}; experts are dealt to ranks with rows"
            " of their own, so leave one of them out")
    if parallel.spreads_experts and (num_shares := num_replicas * parallel.shard) % parallel.ep:
        raise ValueError(
            f"train.parallel.ep must divide the {num_shares} ranks with different rows, got {parallel.ep}; choose a divisor")
    for name in ("tp", "ep"):
        if train.compile and (size := getattr(parallel, name)) > 1:
            raise ValueError(
                f"train.compile must be false with train.parallel.{name} = {size}, got true; layers that ranks compute together have not"
                " been compiled so far, so leave it out")
    if parallel.ranks_per_share > 1 and not rollout.single_rank_load:
        raise ValueError(
            "rollout.single_rank_load must be true with train.parallel.tp or train.parallel.cp above 1, got false; the ranks of such a"
            " group need the same rows, so leave it out")


def check_who_loads(rollout: RolloutConfig, *, run: RunConfig) -> None:
    """Check who draws data and generates rollouts."""
    if rollout.single_rank_load:
        return
    if run.mode == "controller":
        raise ValueError(
            "rollout.single_rank_load must be true with run.mode = 'controller', got false; the controller is the one process that"
            " draws data, so leave it out, or run in SPMD mode")
    if rollout.balance_batch:
        raise ValueError(
            "rollout.balance_batch must be false with rollout.single_rank_load = false, got true; no rank has the whole batch then,"
            " so set rollout.balance_batch to false, or let one rank load")
