"""[evaluate]: held-out accuracy during a run."""

from typing import Any, Self

from pydantic import model_validator

from offbeat.config.base import Change, Section, field


class EvaluateConfig(Section):
    """Evaluation through the same engines that generate rollouts."""

    on_resume = Change.TOLD

    every_steps: int = field(
        10, "Steps between evaluations; 0 evaluates only before the first and after the last step, and data.heldout_size = 0 turns"
        " evaluation of held-out prompts off.", ge=0, on_resume=Change.FREE, basic=True)
    num_prompts: int = field(256, "Held-out prompts per evaluation.", ge=1)
    samples_per_prompt: int = field(
        1, "Answers to each prompt, over which accuracy is the mean; more than one needs a temperature above 0, or all would be equal.",
        ge=1)
    pass_at: tuple[int, ...] = field(
        (), "Numbers k of answers, each at most samples_per_prompt, for which pass@k is reported: the chance that one of k is right.")
    temperature: float = field(0.0, "Sampling temperature; 0 is greedy.", ge=0, read_by=("rl", "sft"))
    timeout_s: float = field(600.0, "Seconds for one evaluation; at least the time limit of one group.", gt=0, on_resume=Change.FREE)
    metric: str = field(
        "", "Dotted name, module:function, of a metric of your own: it gets a list of all answers to a set, and returns a number or some by"
        " name.")
    metric_timeout_s: float = field(
        60.0, "Seconds for one call of that metric, and as long again for the start of its process and for loading it.", gt=0,
        on_resume=Change.FREE)
    keep_samples: bool = field(
        True, "Keep the answers of each evaluation, with texts and rewards, in `evaluations/` in the run, to be read and compared.",
        on_resume=Change.FREE)
    keep_best: str = field(
        "", "Metric of an evaluation, such as eval/accuracy: after each step that raises it, the model is exported to `best/` in the run,"
        " and a checkpoint saved; empty keeps no best model.", read_by=("rl",))
    stop_after_no_gain: int = field(
        0, "Evaluations in a row that do not raise the metric of keep_best, after which the run ends; 0 never ends it.", ge=0,
        read_by=("rl",))
    sets: dict[str, dict[str, Any]] = field(
        {}, "Further evaluation sets: a table [evaluate.sets.NAME] of any settings above but sets, with tables data, rollout and agent"
        " of settings of those sections; what a set leaves out is as in the run.", read_by=("rl",))

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"evaluate.temperature must be above 0 with evaluate.samples_per_prompt = {self.samples_per_prompt}, got 0; greedy answers"
                " to a prompt are all equal")
        if wrong := [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]:
            raise ValueError(
                f"evaluate.pass_at must hold numbers from 1 to evaluate.samples_per_prompt = {self.samples_per_prompt}, got {wrong[0]};"
                " draw more samples")
        return self
