"""The trainer of a reward model: a value model without a bias, whose export is a folder for sequence classification."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from offbeat.config.for_processes import RankConfig
from offbeat.data.tokenizer import load_tokenizer
from offbeat.errors import ConfigError
from offbeat.model.checkpoint_names import published_names
from offbeat.model.divided_read import Divide
from offbeat.model.reward_model import Classifier
from offbeat.trainer.export import change_config, export_folder
from offbeat.trainer.messages import Dtype
from offbeat.trainer.snapshots import ModelSnapshot
from offbeat.trainer.trainer import WHOLE
from offbeat.trainer.value_trainer import ValueTrainer


class RewardTrainer(ValueTrainer):
    """A reward model. It scores `values`; the value of a text's last token is the reward."""

    _has_bias = False

    @classmethod
    def _load_model(cls, folder: str, config: RankConfig, divide: Divide | None) -> PreTrainedModel:
        """See `ValueTrainer`; raises ConfigError with an adapter, ModelError if transformers could not load the exported model."""
        if config.model.lora.rank:
            raise ConfigError(
                f"model.lora.rank must be 0 to train a reward model, got {config.model.lora.rank}; its head and all its weights are"
                " trained, so leave it out")
        model = super()._load_model(folder, config, divide)
        Classifier(model)
        return model

    def snapshot(
        self, dtype: Dtype, *, name: str = WHOLE, merges: bool = False, copies: bool = True,  # noqa: ARG002
    ) -> "RewardSnapshot":
        self._check([name])
        return RewardSnapshot(self._model, self._model_folder, self._whole_state(dtype, copies=copies), dtype)


@dataclass(frozen=True, eq=False)
class RewardSnapshot(ModelSnapshot):
    """A whole reward model."""

    def export(self, folder: Path, *, tokenizer_folder: Path) -> None:
        """Write a Hugging Face folder for sequence classification, whose padding token is the tokenizer's."""
        classifier = Classifier(self.model)
        body = {name: tensor for name, tensor in self.state.items() if name != classifier.head}
        settings = classifier.settings(padding=load_tokenizer(tokenizer_folder).pad_token_id)

        def complete(part: Path) -> None:
            change_config(part, settings)
            for file in part.glob("*"):  # other files of the language model's folder
                if not file.name.startswith("model") and file.name != "config.json" and not (tokenizer_folder / file.name).exists():
                    file.unlink()

        export_folder(
            classifier.weights(published_names(self.model, body), self.state[classifier.head]), folder, model_folder=self.model_folder,
            tokenizer_folder=tokenizer_folder, dtype=self.dtype, add=complete)
