"""[evaluate]: held-out accuracy during a run."""

from offbeat.config.base import Section, field


class EvaluateConfig(Section):
    """Evaluation through the same engines that generate rollouts."""

    every_steps: int = field(10, "Steps between evaluations; 0 evaluates only before the first and after the last step.", ge=0)
    num_prompts: int = field(256, "Held-out prompts per evaluation.", ge=1)
    temperature: float = field(0.0, "Sampling temperature; 0 is greedy.", ge=0)
    timeout_s: float = field(600.0, "Seconds for one evaluation; at least those for one group.", gt=0)
