"""Whether an algorithm compares the policy with a reference, and how often that is refreshed. Torch-free; read by the loop and the trainer.

JOIN: these are fields and a property of `AlgorithmConfig` once [algorithm] has them; then this file goes.
"""

from offbeat.config.algorithms import AlgorithmConfig


def needs_reference(config: AlgorithmConfig) -> bool:
    """Whether a step needs log-probabilities under the reference policy."""
    return getattr(config, "kl_loss", "none") != "none" or getattr(config, "reward_kl", 0.0) > 0


def refresh_steps(config: AlgorithmConfig) -> int:
    """Return the number of training steps after which the present policy becomes the reference; 0 if it never does."""
    return getattr(config, "reference_refresh_steps", 0)
