"""The fast path: our own forward pass for Llama-, Qwen2- and Qwen3-like models, with fused projections.

Chosen by `loader` where `supports` allows. On small models a Hugging Face forward spends more time between kernels than in them; this one
runs about 20 kernels per layer. Tests compare it token by token with Hugging Face's modules.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from offbeat.engine.bag_attention import fast_attention
from offbeat.engine.batch_invariant import Attention, InvariantAttention, fill_rows
from offbeat.engine.cache import CacheShape, DecodeStep, PrefillStep
from offbeat.engine.direct_weights import MATRICES, DirectWeights, Layer, Origin, StateReader, WatchedMatrix, matrices_of
from offbeat.engine.forward import LOGITS_AT_ONCE, bytes_of, ordinary_tokens
from offbeat.engine.int8 import Int8Matrices, Int8Matrix
from offbeat.engine.lora import AdapterRows, Groups, Linear
from offbeat.engine.matrix import HEAD, FloatMatrices, Matrices, Matrix
from offbeat.model.fingerprint import combine, digests, fingerprint
from offbeat.model.uploads import upload

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """Differences between the supported model types."""

    qkv_bias: bool
    qk_norm: bool


FAMILIES = {
    "llama": Family(qkv_bias=False, qk_norm=False),
    "mistral": Family(qkv_bias=False, qk_norm=False),
    "qwen2": Family(qkv_bias=True, qk_norm=False),
    "qwen3": Family(qkv_bias=False, qk_norm=True),
}


STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose frequencies are the same for every token of every sequence."""


def supports(config: PreTrainedConfig) -> bool:
    """Whether this path computes the model exactly as its own modules do."""
    layer_types = getattr(config, "layer_types", None) or ()
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type", "default") in STATIC_ROPES
        and config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
        and not getattr(config, "attention_bias", False)
        and not getattr(config, "mlp_bias", False)
        and all(kind == "full_attention" for kind in layer_types)
        and (bool(layer_types) or getattr(config, "sliding_window", None) is None)
    )


_NOT_INT8 = bytes(32)
"""Digest of what is no int8 matrix, where one should be."""

_WATCHED = (8, 32)
"""Sequences and their length by which `DirectForward.input_ranges` looks at a model."""


class DirectForward:
    """Implements `forward.Forward` with fused projections."""

    def __init__(
        self, config: PreTrainedConfig, state: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device,
        matrices: Matrices | None = None, batch_invariant: bool = False,
    ) -> None:
        """`matrices` chooses their form; None keeps all numbers."""
        self.device = device
        self._matrices = matrices or FloatMatrices()
        self.takes_changes = not isinstance(self._matrices, Int8Matrices)
        self._attention: Attention = InvariantAttention() if batch_invariant else fast_attention(device)
        self.row_multiple = self._attention.row_multiple
        self.reads_images = self.sees_whole = False
        self.family = FAMILIES[config.model_type]
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.num_layers = config.num_hidden_layers
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self._eps = torch.full((), self.eps, dtype=torch.float32, device=device)
        self.tied = bool(config.tie_word_embeddings)
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_position_embeddings
        self.max_score_tokens = 1 << 20  # their logits are computed in blocks
        self.cache_shape = CacheShape(self.num_layers, self.num_kv_heads, self.head_dim, dtype, for_bags=self._attention.for_bags)
        self.lora_groups: Groups = {name: group for i in range(self.num_layers) for name, group in self._layer_groups(i).items()}
        self._scale = self.head_dim**-0.5
        self._frequencies, self._rotary_scale = _rotary_frequencies(config, self.head_dim)
        self._cos, self._sin = self._rotary(0)
        self.install(self.prepare(state))

    # -- weights -----------------------------------------------------------------------------------------------------------------------

    def prepare(self, state: Mapping[str, Tensor]) -> DirectWeights:
        read = StateReader(state, dtype=self.dtype, device=self.device, notes=not self.takes_changes)
        embed = read("model.embed_tokens.weight", self.vocab_size, self.hidden_size)
        head = embed if self.tied else read("lm_head.weight", self.vocab_size, self.hidden_size)
        layers = tuple(self._prepare_layer(read, i) for i in range(self.num_layers))
        weights = DirectWeights(embed, layers, read("model.norm.weight", self.hidden_size), self._matrices.make(HEAD, head))
        made = {name: matrix.digest() for name, matrix in matrices_of(weights) if isinstance(matrix, Int8Matrix)}
        return replace(weights, origin=Origin(read.digests, made)) if made else weights

    def _prepare_layer(self, read: StateReader, i: int) -> Layer:
        hidden, inner, prefix = self.hidden_size, self.intermediate_size, f"model.layers.{i}."

        def get(name: str, *shape: int) -> Tensor:
            return read(prefix + name, *shape)

        def make(name: str, first: Tensor, *rest: Tensor) -> Matrix:
            return self._matrices.make(f"{i}.{name}", torch.cat([first, *rest]) if rest else first)

        sizes = self._qkv_sizes()
        qkv_bias = qk_norm = None
        if self.family.qkv_bias:
            qkv_bias = torch.cat([get(f"self_attn.{p}_proj.bias", size) for p, size in sizes.items()])
        if self.family.qk_norm:
            norms = [(self.num_heads, "q"), (self.num_kv_heads, "k")]
            qk_norm = torch.cat([get(f"self_attn.{p}_norm.weight", self.head_dim).expand(heads, -1) for heads, p in norms])
        return Layer(
            norm1=get("input_layernorm.weight", hidden),
            qkv=make("qkv", *(get(f"self_attn.{p}_proj.weight", size, hidden) for p, size in sizes.items())),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            out=make("out", get("self_attn.o_proj.weight", hidden, self.num_heads * self.head_dim)),
            norm2=get("post_attention_layernorm.weight", hidden),
            gate_up=make("gate_up", *(get(f"mlp.{p}_proj.weight", inner, hidden) for p in ("gate", "up"))),
            down=make("down", get("mlp.down_proj.weight", hidden, inner)),
        )

    def _qkv_sizes(self) -> dict[str, int]:
        kv = self.num_kv_heads * self.head_dim
        return {"q": self.num_heads * self.head_dim, "k": kv, "v": kv}

    def _layer_groups(self, i: int) -> dict[str, tuple[Linear, ...]]:
        hidden, inner, attended = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        prefix = f"model.layers.{i}."
        return {
            f"{i}.qkv": tuple(Linear(f"{prefix}self_attn.{p}_proj", hidden, size) for p, size in self._qkv_sizes().items()),
            f"{i}.out": (Linear(f"{prefix}self_attn.o_proj", attended, hidden),),
            f"{i}.gate_up": tuple(Linear(f"{prefix}mlp.{p}_proj", hidden, inner) for p in ("gate", "up")),
            f"{i}.down": (Linear(f"{prefix}mlp.down_proj", inner, hidden),),
        }

    def install(self, prepared: DirectWeights) -> None:
        self._weights = prepared

    def installed(self) -> DirectWeights:
        return self._weights

    def release(self) -> None:
        del self._weights

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights being served; see `Forward.tensors`. Of int8 matrices, these are the numbers that they stand for."""
        return dict(self._tensors(self._weights))

    def fingerprinter(self) -> Callable[[], str]:
        """See `Forward.fingerprinter`. A matrix in int8 has the digest of what it was made of, if it is what was made of that."""
        return partial(self._fingerprint, self._weights)

    @torch.inference_mode()
    def _fingerprint(self, weights: DirectWeights) -> str:
        if weights.origin is None:
            return fingerprint(bytes_of(self._tensors(weights)))  # one matrix after the other is unpacked
        found = digests(bytes_of(self._vectors(weights).items()))
        for name, matrix in matrices_of(weights):
            published = self._published_names(name)
            own = matrix.digest() if isinstance(matrix, Int8Matrix) else _NOT_INT8
            if own != weights.origin.made[name]:
                logger.warning("the int8 matrix %s is not the one that was made of %s", name, ", ".join(published))
                found |= dict.fromkeys(published, own)
            elif name != HEAD or not self.tied:
                found |= {part: weights.origin.read[part] for part in published}
        return combine(found)

    def _tensors(self, weights: DirectWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `tensors`; a packed matrix is unpacked into new memory when it is reached."""
        yield from self._vectors(weights).items()
        for name, matrix in matrices_of(weights):
            plain, published = matrix.plain, self._published_names(name)
            if name == HEAD and self.tied and (weights.origin is not None or torch.equal(plain, weights.embed)):
                continue  # a packed head is a copy even where it is tied
            sizes = [linear.outputs for linear in self.lora_groups[name]] if name != HEAD else [self.vocab_size]
            yield from zip(published, plain.split(sizes), strict=True)

    def _published_names(self, name: str) -> list[str]:
        """Return the published names of the tensors that the matrix of this name has, in order."""
        return ["lm_head.weight"] if name == HEAD else [f"{linear.name}.weight" for linear in self.lora_groups[name]]

    def _vectors(self, weights: DirectWeights) -> dict[str, Tensor]:
        """Return everything but the matrices by its published name, such as "model.embed_tokens.weight" [V, H]."""
        named = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
        sizes = self._qkv_sizes()
        for i, layer in enumerate(weights.layers):
            prefix = f"model.layers.{i}."
            named |= {f"{prefix}input_layernorm.weight": layer.norm1, f"{prefix}post_attention_layernorm.weight": layer.norm2}
            if layer.qkv_bias is not None:
                biases = zip(sizes, layer.qkv_bias.split(list(sizes.values())), strict=True)
                named |= {f"{prefix}self_attn.{p}_proj.bias": bias for p, bias in biases}
            if layer.qk_norm is not None:
                named[f"{prefix}self_attn.q_norm.weight"] = layer.qk_norm[0]
                named[f"{prefix}self_attn.k_norm.weight"] = layer.qk_norm[self.num_heads]
        return named

    @torch.inference_mode()
    def input_ranges(self) -> dict[str, Tensor]:
        """Return the largest size of each input of each matrix, [I] float32 by name, such as "0.qkv", over some ordinary tokens."""
        weights = self._weights
        layers = tuple(replace(layer, **{name: WatchedMatrix(getattr(layer, name)) for name in MATRICES}) for layer in weights.layers)
        watched = replace(weights, layers=layers, head=WatchedMatrix(weights.head))
        self._weights = watched
        try:
            for _ in self.score(ordinary_tokens(self.vocab_size, _WATCHED[0] * _WATCHED[1]).view(_WATCHED).to(self.device)):
                pass
        finally:
            self._weights = weights
        return {name: matrix.largest for name, matrix in matrices_of(watched) if isinstance(matrix, WatchedMatrix)}

    # -- forward -----------------------------------------------------------------------------------------------------------------------

    def shift_of(self, tokens: np.ndarray) -> int:  # noqa: ARG002
        """See `Forward.shift_of`; the models of this path read no images."""
        return 0

    def prefill(
        self, tokens: Tensor, step: PrefillStep, *, lora: AdapterRows | None = None,
        sequences: Sequence[np.ndarray] | None = None,  # noqa: ARG002
    ) -> Tensor:
        hidden = self._run_prompts(tokens, step, lora)
        return self._logits(hidden[torch.arange(len(tokens), device=self.device), step.last])

    def score(self, tokens: Tensor, *, lora: AdapterRows | None = None) -> Iterable[Tensor]:
        hidden = self._run_prompts(tokens, None, lora).flatten(0, 1)
        return map(self._logits, hidden.split(max(LOGITS_AT_ONCE // self.vocab_size, 1)))

    def decode(
        self, tokens: Tensor, step: DecodeStep, *, lora: AdapterRows | None = None, shifts: np.ndarray | None = None,  # noqa: ARG002
    ) -> Tensor:
        weights = self._weights
        attend = self._attention.of_step(step, num_heads=self.num_heads, scale=self._scale)
        self._grow_rotary(step.width)
        cos, sin = self._cos[step.positions, None], self._sin[step.positions, None]
        x = self._embed(tokens)
        for i, layer in enumerate(weights.layers):
            queries, keys, values = self._project(x, i, layer, cos, sin, lora)
            x = self._finish_layer(x, attend(i, queries, keys, values), i, layer, lora)
        return self._logits(x)[: step.rows]

    def _run_prompts(self, tokens: Tensor, step: PrefillStep | None, lora: AdapterRows | None) -> Tensor:
        """Compute the last layer's output [N, L, hidden] for token ids [N, L] int64. Causal attention alone hides padding on the right."""
        weights = self._weights
        num, length = tokens.shape
        positions = torch.arange(length, device=self.device).repeat(num) if step is None else step.positions.flatten()
        self._grow_rotary(length if step is None else step.width)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        mask = None if step is None else step.mask
        x = self._embed(tokens.flatten())
        for i, layer in enumerate(weights.layers):
            heads = self._project(x, i, layer, cos, sin, lora)
            queries, keys, values = (part.unflatten(0, (num, length)).transpose(1, 2) for part in heads)
            if step is not None:
                keys, values = step.extend(i, keys, values)
            attended = self._attention.attend_prompts(queries, keys, values, mask=mask, scale=self._scale)
            x = self._finish_layer(x, attended.transpose(1, 2).reshape(num * length, -1), i, layer, lora)
        return x[: num * length].view(num, length, -1)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens [N] int64 and the rows that fill them up, [at least N, hidden]; layers keep such rows."""
        return fill_rows(F.embedding(tokens, self._weights.embed), self.row_multiple)

    def _project(
        self, x: Tensor, i: int, layer: Layer, cos: Tensor, sin: Tensor, lora: AdapterRows | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project [at least N, hidden] to rotated queries [N, heads, head_dim], and rotated keys and values [N, kv_heads, head_dim].

        `cos` and `sin` are [N, 1, head_dim].
        """
        normed = self._norm(x, layer.norm1)
        projected = layer.qkv(normed, layer.qkv_bias)
        if lora is not None:
            lora.add(f"{i}.qkv", normed, projected)
        heads = projected[: len(cos)].view(len(cos), -1, self.head_dim)
        rotated = plain = heads[:, : self.num_heads + self.num_kv_heads]
        if layer.qk_norm is not None:
            plain = self._norm(rotated, layer.qk_norm)
        torch.addcmul(plain * cos, plain.roll(self.head_dim // 2, -1), sin, out=rotated)
        queries, keys, values = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        return queries, keys, values

    def _finish_layer(self, x: Tensor, attended: Tensor, i: int, layer: Layer, lora: AdapterRows | None) -> Tensor:
        attended = fill_rows(attended, self.row_multiple)
        x = layer.out.add(x, attended)
        if lora is not None:
            lora.add(f"{i}.out", attended, x)
        normed = self._norm(x, layer.norm2)
        gate_up = layer.gate_up(normed)
        if lora is not None:
            lora.add(f"{i}.gate_up", normed, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = F.silu(gate) * up
        x = layer.down.add(x, inner)
        if lora is not None:
            lora.add(f"{i}.down", inner, x)
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        rows = fill_rows(hidden, self.row_multiple)
        return self._weights.head(self._norm(rows, self._weights.norm))[: len(hidden)]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension of x [..., H], in float32 and rounded before the weight as in transformers; torch takes more
        kernels.
        """
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def _grow_rotary(self, length: int) -> None:
        if length > len(self._cos):
            self._cos, self._sin = self._rotary(2 * length)

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of L positions, each [L, head_dim]; the first half of the sines is negated, so that a roll rotates."""
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._rotary_scale, angles.sin() * self._rotary_scale
        tables = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        cos, sin = (upload(table.to(self.dtype), self.device) for table in tables)
        return cos, sin


def _rotary_frequencies(config: PreTrainedConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle per position of each pair, [D / 2] float32 with D = `head_dim`, and the factor of cosines and sines."""
    rope = config.rope_parameters
    if (kind := rope.get("rope_type", "default")) != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)), 1.0
