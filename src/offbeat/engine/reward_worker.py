"""The process of a reward model: scores answers to prompts. Torch is imported here, so it is started by name."""

import math

from transformers import PreTrainedModel

from offbeat.data.reward_model import RewardFolder, choose_padding, judged_tokens, open_reward_folder
from offbeat.engine.reward_options import RewardModelOptions, ScoredTexts, TextsToScore
from offbeat.errors import DataError, ModelError
from offbeat.model.reward_model import load_reward_model, score_texts, set_padding
from offbeat.workers.worker import Nothing, WorkerService


class RewardModelWorker(WorkerService):
    """The service of one process: `load` once, then `score`."""

    def __init__(self) -> None:
        self._options: RewardModelOptions | None = None

    def load(self, request: RewardModelOptions) -> Nothing:
        """Load the model. Raises ModelError if it cannot be used."""
        self._folder: RewardFolder = open_reward_folder(request.model)
        self._model: PreTrainedModel = load_reward_model(str(self._folder.path), dtype=request.dtype)
        own = self._model.config.get_text_config().pad_token_id
        self._padding = set_padding(self._model, self._id(choose_padding(self._folder.tokenizer)) if own is None else own)
        self._options = request
        return Nothing()

    def score(self, request: TextsToScore) -> ScoredTexts:
        """Score all texts, except for those that cannot be made or are longer than the model's context."""
        options = self._options
        assert options is not None, "score before load"
        failures = [""] * len(request.answers)
        texts: dict[int, list[int]] = {}
        for index, (prompt, answer) in enumerate(zip(request.prompts, request.answers, strict=True)):
            try:
                texts[index] = judged_tokens(prompt, answer, self._folder.tokenizer, system_prompt=options.system_prompt)
            except (DataError, ModelError) as exc:
                failures[index] = str(exc)
                continue
            context = self._folder.context
            if context is not None and len(texts[index]) > context:
                failures[index] = f"the text of {len(texts.pop(index))} tokens is longer than the reward model's context of {context}"
        found = score_texts(self._model, list(texts.values()), padding=self._padding, max_tokens=options.max_tokens)
        rewards = [math.nan] * len(request.answers)
        for index, reward in zip(texts, found, strict=True):
            rewards[index] = reward
            if not math.isfinite(reward):
                failures[index] = f"the reward model gave {reward}"
        return ScoredTexts(tuple(rewards), tuple(failures))

    def _id(self, token: str) -> int:
        found = self._folder.tokenizer.special_tokens.get(token)
        assert found is not None, f"{token} is a special token"
        return found
