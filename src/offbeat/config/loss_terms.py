"""Filters and regularisers, with the columns that each reads. Formulas are in `losses.weights` and `losses.regularisers`. Torch-free.

A column ending in "_mask" is computed by `algorithms.selection` or with the advantages; "anchor" is the `LossSpec`'s.
"""

from collections.abc import Mapping
from types import MappingProxyType

_BOTH = ("prox_logprobs", "rollout_logprobs")

FILTERS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "ratio": _BOTH, "k1": _BOTH, "k2": _BOTH, "k3": _BOTH, "binary_kl": _BOTH, "tv": _BOTH, "opsm": ("rollout_logprobs",),
    "m2": (*_BOTH, "m2_mask"), "clip_cov": ("rollout_logprobs", "detach_mask")})
"""Metrics of filters, with the columns that each reads."""

REGULARISERS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "k2": ("ref_logprobs",), "k3": ("ref_logprobs",), "ratio_k3": ("anchor", "ref_logprobs"), "entropy": ("entropy",),
    "drift": ("rollout_logprobs",), "imitation": ("imitate_mask",), "kl_cov": ("prox_logprobs", "kl_cov_mask")})
"""Kinds of regularisers, with the columns that each reads."""

OWN_FILTERS = tuple(name for name in FILTERS if name != "clip_cov")
"""Metrics that `algorithm.filters` may name; clip_cov is set by `algorithm.cov_control`."""
