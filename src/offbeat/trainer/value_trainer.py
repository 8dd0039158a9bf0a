"""The trainer of a value model, which gives a number instead of log-probabilities: the critic of a policy, or a reward model."""

import math
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np
import torch
from transformers import PreTrainedModel

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.for_processes import RankConfig
from offbeat.data.batch import Batch
from offbeat.data.image_store import images_folder
from offbeat.model.divided_read import Divide
from offbeat.model.values import ValueHead, check_value_head, put_value_head
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer.messages import Trained, TrainStep
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.policy import load_policy, predict_values

_DECAY = 0.99
_SMALLEST_SCALE = 1e-3


class ValueTrainer(ModelTrainer):
    """A whole model with a value head. It scores `values`, and trains with losses that read them as predictions."""

    _predict = staticmethod(predict_values)
    _predicts = "values"
    _has_bias = True
    _policy: ModelTrainer | None = None
    _normalises = False

    @classmethod
    def build_critic(cls, folder: str, *, config: RankConfig, groups: ProcessGroups, policy: ModelTrainer | None) -> Self:
        """Build the critic of a run; raises as `build`.

        It begins with the weights of `policy`, as far as these have been trained when its own training begins; None keeps the folder's.
        """
        train = config.train.model_copy(update={"router_aux_loss_coefficient": 0.0})
        trainer = cls.build(folder, config=config.model_copy(update={"algorithm": AlgorithmConfig(), "train": train}), groups=groups)
        trainer._policy, trainer._normalises = policy, config.critic.normalise
        return trainer

    def train_step(self, request: TrainStep) -> Trained:
        """See `Trainer.train_step`. A critic that normalises takes the returns into its units first."""
        return super().train_step(replace(request, batch=self._normalised(request.batch)) if self._normalises else request)

    def restart_optimizer(self, request: None = None) -> None:
        """See `Trainer.restart_optimizer`. Comes before the policy's, which forgets whether it has been trained."""
        if self._policy is not None and self._policy.step:
            self._adopt(self._policy)
        super().restart_optimizer(request)

    @classmethod
    def _load_model(cls, folder: str, config: RankConfig, divide: Divide | None) -> PreTrainedModel:
        give_head = partial(put_value_head, bias=cls._has_bias)
        model = load_policy(folder, config=config.train, divide=divide, give_head=give_head, images=images_folder(config.run_dir))
        check_value_head(model)
        return model

    @property
    def _head(self) -> ValueHead:
        head = self._model.get_output_embeddings()
        assert isinstance(head, ValueHead), "a value model has a value head"
        return head

    @torch.no_grad()
    def _adopt(self, policy: ModelTrainer) -> None:
        """Take over the policy's weights, except its head; every rank copies its own part."""
        own = {id(parameter) for parameter in self._head.parameters()}
        theirs = dict(policy.model.named_parameters())
        for name, parameter in self._strategy.model.named_parameters():
            if id(parameter) not in own:
                parameter.copy_(theirs[name])

    def _normalised(self, batch: Batch) -> Batch:
        """Move the head's units to the running mean and deviation of all ranks' returns, and give the batch's loss in these units.

        Source: PopArt, arXiv:1602.07714.
        """
        returns, head = batch.columns["returns"].astype(np.float64), self._head
        sums = self.groups.shares.sum_scalars(
            "value_scale", {"count": len(returns), "sum": returns.sum(), "squares": np.square(returns).sum()})
        if sums["count"]:
            mean, square = sums["sum"] / sums["count"], sums["squares"] / sums["count"]
            if self.step:
                mean = _DECAY * head.mean.item() + (1 - _DECAY) * mean
                square = _DECAY * (head.scale.item() ** 2 + head.mean.item() ** 2) + (1 - _DECAY) * square
            head.change_units(mean=mean, scale=max(math.sqrt(max(square - mean**2, 0.0)), _SMALLEST_SCALE))
        scale = head.scale.item()
        losses = tuple(replace(loss, constants={"clip": float(loss.constants["clip"]) * scale}) for loss in batch.losses)
        return replace(batch, losses=losses).with_columns(loss_weights=batch.columns["loss_weights"] / scale**2)
