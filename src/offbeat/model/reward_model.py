"""Reward models in the form of transformers, a sequence classifier with one label: loading, scoring texts, and the folder's format.

The reward of a text is the label's logit at the last token that is not padding. Called by its process, and by the trainer that exports one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from offbeat.errors import ModelError, first_line
from offbeat.model.load import DTYPES
from offbeat.sync.platform import current_platform

_HEAD = "score.weight"


def load_reward_model(folder: str, *, dtype: str) -> PreTrainedModel:
    """Load a folder that `offbeat.data.reward_model.open_reward_folder` has checked, in eval mode, onto this process's device.

    Raises ModelError if its architecture is unknown, or weights are missing or have wrong shapes.
    """
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as exc:
        raise ModelError(f"the reward model {folder} cannot be loaded: {first_line(exc)}") from exc
    model, report = loaded
    if wrong := sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])]):
        raise ModelError(
            f"the reward model {folder} lacks or misshapes {len(wrong)} weights, {wrong[0]!r} first; its config.json must describe them")
    return model.to(current_platform.device).eval()


@torch.inference_mode()
def score_texts(model: PreTrainedModel, texts: Sequence[Sequence[int]], *, padding: int, max_tokens: int) -> list[float]:
    """Return the reward of each text, computed in batches of like length.

    Args:
        texts: token ids of each; none may end with `padding`.
        max_tokens: largest number of tokens of a batch, padding included; a longer text is a batch of its own.
    """
    rewards = [0.0] * len(texts)
    for chosen in _batches([len(text) for text in texts], max_tokens):
        longest = max(len(texts[index]) for index in chosen)
        tokens = torch.full((len(chosen), longest), padding, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, index in enumerate(chosen):
            tokens[row, : len(texts[index])] = torch.tensor(texts[index], dtype=torch.int64)
            mask[row, : len(texts[index])] = 1
        logits = model(input_ids=tokens.to(model.device), attention_mask=mask.to(model.device)).logits
        for index, reward in zip(chosen, logits[:, 0].float().tolist(), strict=True):
            rewards[index] = reward
    return rewards


def set_padding(model: PreTrainedModel, padding: int) -> int:
    """Return the id of the model's padding token; where its configuration has none, set it to `padding`."""
    config = model.config.get_text_config()
    if config.pad_token_id is None:
        config.pad_token_id = model.config.pad_token_id = padding
    return config.pad_token_id


class Classifier:
    """The sequence classifier of transformers that belongs to a language model, whose value head's weight is named `head`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find it. Raises ModelError if transformers has none for this kind of model, or one with other weights."""
        config, kind = model.config, next(each.__name__ for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ModelError(f"transformers has no sequence classifier for {kind}, so that it cannot become a reward model; use another")
        self._class: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        output = model.get_output_embeddings()
        self.head = next(f"{name}.weight" for name, module in model.named_modules() if module is output)
        with torch.device("meta"):
            expected = self._class(type(config).from_dict({**config.to_dict(), **self.settings(padding=0)})).state_dict()
        own = {_HEAD if name == self.head else name: tensor.shape for name, tensor in model.state_dict().items()}
        wanted = {name: tensor.shape for name, tensor in expected.items()}
        if different := sorted(name for name in own.keys() | wanted.keys() if own.get(name) != wanted.get(name)):
            raise ModelError(
                f"the sequence classifier of transformers for {kind} has other weights, {different[0]!r} first, so that it cannot become a"
                " reward model; use another")

    def settings(self, *, padding: int) -> dict[str, Any]:
        """Return the settings of its config.json that differ from the language model's."""
        return {"architectures": [self._class.__name__], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": padding}

    def weights(self, body: Mapping[str, Tensor], head: Tensor) -> dict[str, Tensor]:
        """Return its weights by name: the published ones of the language model without its head, and the head [1, H]."""
        return {**body, _HEAD: head}


def _batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return indices of texts that run together, shortest first."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
