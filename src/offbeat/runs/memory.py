"""Memory of a model on a train rank: states and activations. Pure arithmetic, torch-free.

docs/scaling.md states the formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from offbeat.config.model import ROUNDED_BYTES


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder such as Qwen3 or Llama.

    Attributes:
        hidden: width of the residual stream, H.
        layers: number of blocks, L.
        queries, keys: heads times width of a head, Q and K, of queries and of keys; values are as wide as keys.
        intermediate: width of the feed-forward layer, I.
        vocabulary: V.
        tied: whether the head is the embedding.
    """

    hidden: int
    layers: int
    queries: int
    keys: int
    intermediate: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the contents of a model's config.json."""
        config = config.get("text_config") or config
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            hidden=config["hidden_size"], layers=config["num_hidden_layers"], queries=heads * width,
            keys=(config.get("num_key_value_heads") or heads) * width, intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"], tied=bool(config.get("tie_word_embeddings", False)))

    @property
    def matrices_of_block(self) -> int:
        """Number of weights in the matrices of a block: 2·H·Q + 2·H·K + 3·H·I."""
        return 2 * self.hidden * (self.queries + self.keys) + 3 * self.hidden * self.intermediate

    @property
    def width_of_adapters(self) -> int:
        """Weights of an adapter of rank 1 on all linear layers: their inputs and outputs, L·(7·H + 2·Q + 2·K + 3·I)."""
        return self.layers * (7 * self.hidden + 2 * (self.queries + self.keys) + 3 * self.intermediate)

    @property
    def num_parameters(self) -> int:
        """N = V·H·(1 or 2) + L·(2·H·Q + 2·H·K + 3·H·I + 2·H) + H; norms of heads and biases, a millionth of it, are left out."""
        block = self.matrices_of_block + 2 * self.hidden
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.layers * block + self.hidden


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one train rank.

    Attributes:
        weights, gradients: float32 states that stay from step to step. A frozen model has weights alone, in its own format, and the
            adapter's weights and gradients are added.
        optimizer: AdamW's two float32 moments; 0 if they are offloaded.
        gathered: with shards, the whole weights of the block that computes and of the next one, and the embedding or the head.
        activations: numbers that the forward pass of a micro-batch saves for the backward pass, without the head's chunk of logits.
        host: offloaded moments in host memory.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations


@dataclass(frozen=True)
class TrainedAdapter:
    """An adapter on all linear layers, which every rank holds whole.

    Attributes:
        rank: `model.lora.rank`, such as 16.
        half: whether the frozen weights under it are bfloat16 (`model.dtype`).
        form: form to which the blocks' matrices under it are rounded (`model.quantization`).
    """

    rank: int
    half: bool = False
    form: Literal["none", "int8", "nf4"] = "none"


def rank_memory(
    shape: ModelShape, *, tokens: int, num_shards: int = 1, mixed: bool = True, checkpointing: bool = False, offloads: bool = False,
    adapter: TrainedAdapter | None = None,
) -> RankMemory:
    """Estimate one train rank's memory; leave a tenth or two free for logits, the allocator and the collectives.

    Args:
        tokens: T, as many as `train.max_tokens_per_microbatch`, such as 8192.
        num_shards: number of ranks that a model is sharded over; 1 for replicas.
        mixed: whether layers compute in bfloat16 (`train.precision`).
        checkpointing: whether activations are computed again in full.
        offloads: whether moments are kept in host memory (`train.offload_optimizer`).
        adapter: the adapter that is trained; None trains the model's weights.
    """
    each = 2 if adapter is not None and adapter.half else 4
    form = "none" if adapter is None else adapter.form
    rounded = 0 if form == "none" else shape.layers * shape.matrices_of_block
    weights = each * -(-(shape.num_parameters - rounded) // num_shards) + int(ROUNDED_BYTES[form] * rounded)
    of_adapter = 0 if adapter is None else 4 * adapter.rank * shape.width_of_adapters
    trained = of_adapter or weights
    gathered = each * (2 * shape.matrices_of_block + shape.vocabulary * shape.hidden) if num_shards > 1 else 0
    activations = _activations(shape, tokens, mixed=mixed, checkpointing=checkpointing)
    moments = 2 * trained
    return RankMemory(weights + of_adapter, trained, 0 if offloads else moments, gathered, activations, host=moments if offloads else 0)


def _activations(shape: ModelShape, tokens: int, *, mixed: bool, checkpointing: bool) -> int:
    """Return the bytes of activations: a block saves 7·H + 5·Q + 5·K + 4·I numbers per token, of 4 bytes, or 5/2 in mixed precision."""
    block = tokens * (7 * shape.hidden + 5 * (shape.queries + shape.keys) + 4 * shape.intermediate) * (5 if mixed else 8) // 2
    if checkpointing:  # the input of every block, and one block at a time
        return tokens * shape.hidden * 4 * shape.layers + block
    return block * shape.layers
