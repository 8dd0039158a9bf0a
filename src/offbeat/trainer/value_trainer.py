"""The trainer of a value model, which gives a number instead of log-probabilities: the critic of a policy, or a reward model."""

from transformers import PreTrainedModel

from offbeat.config.root import Config
from offbeat.model.values import give_value_head
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.policy import load_policy, predict_values


class ValueTrainer(ModelTrainer):
    """A whole model with a value head. It scores `values`, and trains with losses that read them as predictions."""

    _predict = staticmethod(predict_values)
    _predicts = "values"
    _has_bias = True

    @classmethod
    def _load_model(cls, folder: str, config: Config) -> PreTrainedModel:
        model = load_policy(folder, config=config.train)
        give_value_head(model, bias=cls._has_bias)
        return model
