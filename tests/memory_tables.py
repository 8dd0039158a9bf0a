"""The shapes of well-known models, and the tables of docs/scaling.md made of them: `python tests/memory_tables.py` prints the tables."""

from offbeat.runs.memory import ModelShape, TrainedAdapter, rank_memory

GIB = 2**30

_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
MODELS = {
    "Qwen3-0.6B": ModelShape.of(_QWEN3 | {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072, "tie_word_embeddings": True}),
    "Qwen3-1.7B": ModelShape.of(_QWEN3 | {
        "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144, "tie_word_embeddings": True}),
    "Qwen3-4B": ModelShape.of(_QWEN3 | {
        "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728, "tie_word_embeddings": True}),
    "Qwen3-8B": ModelShape.of(_QWEN3 | {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}),
    "Qwen3-14B": ModelShape.of(_QWEN3 | {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 17408}),
    "Qwen3-32B": ModelShape.of(_QWEN3 | {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600}),
    "Llama-3.1-70B": ModelShape.of({
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
        "vocab_size": 128256}),
}


def engine_weights(shape: ModelShape, *, num_devices: int = 1) -> int:
    """Return the bytes of bfloat16 weights on each device of an engine."""
    return 2 * -(-shape.num_parameters // num_devices)


def cache_bytes_per_token(shape: ModelShape) -> int:
    """Return the bytes of bfloat16 keys and values of one token, over all devices of an engine."""
    return 2 * 2 * shape.layers * shape.keys


def memory_table(*, tokens: int = 16384, shards: tuple[int, ...] = (8, 32)) -> str:
    """Return a table of docs/scaling.md: GiB by model, with activations of `tokens` tokens in mixed precision."""
    heads = ["Model", "Parameters", "Weights", "Gradients", "Optimizer", "Together", *(f"Over {count} ranks" for count in shards),
             "Activations", "with checkpointing", "Engine", "Cache of 100k tokens"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, shape in MODELS.items():
        whole = rank_memory(shape, tokens=tokens)
        states = [rank_memory(shape, tokens=0, num_shards=count).total for count in shards]
        saved = rank_memory(shape, tokens=tokens, checkpointing=True).activations
        sizes = [whole.weights, whole.gradients, whole.optimizer, whole.total - whole.activations, *states, whole.activations, saved,
                 engine_weights(shape), 100_000 * cache_bytes_per_token(shape)]
        lines.append([name, f"{shape.num_parameters / 1e9:.2f}B", *(f"{size / GIB:.1f}" for size in sizes)])
    return _rows(lines)


def adapter_table(*, rank: int = 16, shards: tuple[int, ...] = (8, 32)) -> str:
    """Return the table of docs/scaling.md for adapters of a rank: GiB by model and `model.dtype`, without activations."""
    heads = ["Model", f"Adapter of rank {rank}", *(
        f"{dtype}{places}" for dtype in ("float32", "bfloat16") for places in ("", *(f" over {count}" for count in shards)))]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, shape in MODELS.items():
        sizes = [rank_memory(shape, tokens=0, num_shards=count, adapter=TrainedAdapter(rank, half=half)).total
                 for half in (False, True) for count in (1, *shards)]
        lines.append([name, *(f"{size / GIB:.1f}" for size in (16 * rank * shape.width_of_adapters, *sizes))])
    return _rows(lines)


def _rows(lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(memory_table())
    print(adapter_table())
