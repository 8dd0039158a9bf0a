"""The sections that say what a run learns from and how: model, data, algorithm, and one for each kind of training.

A kind of training on examples is added by its section here, or in a module of its own, and its lesson in `controller`; the table
`config.root.TRAINING_KINDS`, and with it commands and Python functions, follow from the fields.
"""

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.base import Section, field
from offbeat.config.critic import CriticConfig
from offbeat.config.curriculum import CurriculumConfig
from offbeat.config.data import DataConfig
from offbeat.config.model import ModelConfig
from offbeat.config.preference import PreferenceConfig
from offbeat.config.reward_model import RewardModelConfig
from offbeat.config.run import RunConfig
from offbeat.config.teacher import TeacherConfig
from offbeat.config.train import SftConfig, TrainConfig


class LearningConfig(Section):
    """What a run learns from, and how."""

    run: RunConfig = field(RunConfig(), "The run as a whole.")
    model: ModelConfig = field(ModelConfig(), "The model.")
    data: DataConfig = field(DataConfig(), "Prompts and answers.")
    curriculum: CurriculumConfig = field(CurriculumConfig(), "Which prompts are drawn again.")
    algorithm: AlgorithmConfig = field(AlgorithmConfig(), "The objective.")
    teacher: TeacherConfig = field(TeacherConfig(), "Distillation.")
    train: TrainConfig = field(TrainConfig(), "The ranks that learn.")
    sft: SftConfig = field(SftConfig(), "Supervised fine-tuning.")
    critic: CriticConfig = field(CriticConfig(), "The critic.")
    preference: PreferenceConfig = field(PreferenceConfig(), "Preference training.")
    reward_model: RewardModelConfig = field(RewardModelConfig(), "Reward models.")
