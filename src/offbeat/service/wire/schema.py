"""Table of the protocol's binary messages, by which `proto` decodes and encodes.

Requests for passes and the results of passes and samples are protocol buffers (proto3); everything else is JSON. Each line of the table
names a message and its fields: number, name and type, with `*` for a repeated field and `{type}` for a map from strings. Enums are int32;
bytes hold little-endian arrays.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

STOP, LENGTH = 0, 1
"""Values of the enum StopReason."""
FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of the enum DType."""

_TABLE = """
ForwardBackwardRequest  1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, 5 loss_fn_config {double}, 6 forward_only bool,
                        7 loss_fn_config_v2 {LossConfigValue}
LossConfigValue         1 number double, 2 text string
Datum                   1 model_input Chunk*, 2 loss_fn_inputs {Tensor}
Chunk                   1 encoded_text EncodedTextChunk, 2 image ImageChunk, 3 dmel bytes
EncodedTextChunk        1 tokens bytes
ImageChunk              1 data bytes, 2 format string, 3 expected_tokens int32, 4 override_dimensions bytes
Tensor                  1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*
SparseCsr               1 values bytes, 2 crow_indices bytes, 3 col_indices bytes
ForwardBackwardOutput   1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics {double}
ArrayRecord             1 type_tag string, 2 fields {BatchedTensor}, 3 num_datums int64
BatchedTensor           1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*
SampleResponse          1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs,
                        4 prompt_cache_hit_tokens int32, 5 target_prompt_logprobs Tensor, 6 prompt_alt_tokens PromptAltTokens
SampledSequence         1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs TopkLogprobs
TopkLogprobs            1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32
PromptAltTokens         1 tokens Tensor, 2 logprobs Tensor
"""


class ProtoField(NamedTuple):
    """One field of a message. `kind` is a scalar type or a message's name; for a map, the name of its entries' message."""

    number: int
    name: str
    kind: str
    form: Literal["one", "many", "map"]


def _field(text: str) -> ProtoField:
    number, name, kind = text.split()
    if kind[0] == "{":
        return ProtoField(int(number), name, f"entry of {kind[1:-1]}", "map")
    return ProtoField(int(number), name, kind.rstrip("*"), "many" if kind[-1] == "*" else "one")


def _messages() -> dict[str, dict[int, ProtoField]]:
    messages: dict[str, dict[int, ProtoField]] = {}
    for line in _TABLE.replace(",\n", ",").strip().splitlines():
        name, fields = line.split(maxsplit=1)
        messages[name] = {field.number: field for field in map(_field, fields.split(","))}
    for field in [field for fields in messages.values() for field in fields.values() if field.form == "map"]:
        value = field.kind.removeprefix("entry of ")
        messages[field.kind] = {1: ProtoField(1, "key", "string", "one"), 2: ProtoField(2, "value", value, "one")}
    return messages


SCHEMA: Mapping[str, Mapping[int, ProtoField]] = MappingProxyType(_messages())
"""Fields of each message, by number."""
