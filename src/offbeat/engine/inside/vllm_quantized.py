"""Weights of 8 or 4 bits in vLLM, made from whole weights each time they are loaded. `vllm_serve` imports it where a run asks for them.

vLLM makes weights of 8-bit floats by itself while it loads (`--quantization fp8_per_channel`), but linear layers of whole numbers only from
a checkpoint that has them. This registers two forms, `offbeat_int8` and `offbeat_int4`, which round what is loaded, at the start and at
every reload, and hand it to vLLM's kernels for CPUs and GPUs. So a version is published as for any other engine, and fused and split layers
are rounded as they are computed with. Embeddings and the output head stay whole.
"""

from collections.abc import Sequence
from typing import Any

import torch
from rounding import GROUP, round_matrix
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel, init_int8_linear_kernel
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import pack_quantized_values_into_int32
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types


class _Rounded(OnlineLinearBase):
    """A layer that is rounded when its weights are whole; vLLM makes room for them one layer at a time."""

    activation_quant_key = None
    form: str
    kernel: Any

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Round the weights that were loaded, and have vLLM's kernel pack them."""
        if not getattr(layer, "_already_called_process_weights_after_loading", False):
            self._pack(layer, self.get_weight_for_quantization(layer).data)
            layer._already_called_process_weights_after_loading = True  # type: ignore[assignment]

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)

    def _pack(self, layer: nn.Module, weight: Tensor) -> None:
        raise NotImplementedError


class Int8Linear(_Rounded):
    """Weights of 8 bits with a scale for each output, times activations that are rounded to 8 bits row by row."""

    form = "int8"

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=type(self).__name__)

    def _pack(self, layer: nn.Module, weight: Tensor) -> None:
        rounded = round_matrix(self.form, weight)
        layer.weight = _frozen(rounded.numbers)
        layer.weight_scale = _frozen(rounded.scales)
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        self.kernel.process_weights_after_loading(layer)
        self._scales = layer.weight_scale  # oneDNN reads its memory
        if layer.weight is None:  # in oneDNN's memory; adapters ask for its device
            layer.weight = _frozen(torch.empty(0))


class Int4Linear(_Rounded):
    """Weights of 4 bits with a scale for every 32 inputs of an output, times whole activations."""

    form = "int4"

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: Sequence[int], input_size: int, output_size: int,
        params_dtype: torch.dtype, **attributes: Any,
    ) -> None:
        super().create_weights(
            layer, input_size_per_partition, list(output_partition_sizes), input_size, output_size, params_dtype, **attributes)
        config = MPLinearLayerConfig(
            full_weight_shape=(input_size, output_size), partition_weight_shape=(input_size_per_partition, sum(output_partition_sizes)),
            weight_type=scalar_types.uint4b8, act_type=params_dtype, group_size=GROUP, zero_points=False)
        self.kernel = choose_mp_linear_kernel(config)(config, "weight_packed", "weight_scale", "weight_zero_point")

    def _pack(self, layer: nn.Module, weight: Tensor) -> None:
        rounded = round_matrix(self.form, weight)
        packed = pack_quantized_values_into_int32(rounded.numbers.int() + 8, scalar_types.uint4b8, 1)
        loader = layer.weight.weight_loader
        layer.weight_packed = PackedvLLMParameter(
            data=packed, input_dim=1, output_dim=0, packed_dim=1, packed_factor=8, weight_loader=loader)
        layer.weight_scale = GroupQuantScaleParameter(data=rounded.scales, input_dim=1, output_dim=0, weight_loader=loader)
        del layer.weight
        self.kernel.process_weights_after_loading(layer)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class _Form(QuantizationConfig):
    """What vLLM asks of a form of weights, of which `name` is the value of `--quantization`."""

    name: str
    linear: type[_Rounded]

    @classmethod
    def get_name(cls) -> Any:
        return cls.name

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "_Form":  # noqa: ARG003 - of the protocol
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            raise ValueError(f"{prefix} is a mixture of experts, which {self.get_name()} does not round; use fp8, or whole weights")
        return self.linear() if isinstance(layer, LinearBase) else None


@register_quantization_config("offbeat_int8")
class Int8(_Form):
    """Whole numbers of 8 bits."""

    name, linear = "offbeat_int8", Int8Linear


@register_quantization_config("offbeat_int4")
class Int4(_Form):
    """Whole numbers of 4 bits."""

    name, linear = "offbeat_int4", Int4Linear
