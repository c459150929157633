"""Build the teacher that a run distils from."""

from r1_cli.config import RunConfig
from r1_cli.train.teaching import AdvantageTeacher, LossTeacher
from r1_cli.train.types import Policy, Teacher
from r1_core.advantages.distillation import Distillation


def build_teacher(config: RunConfig, learner: Policy) -> Teacher:
    settings = config.algorithm.distillation
    if settings.form == "loss":
        return LossTeacher()
    distillation = Distillation(settings.coef, settings.clip, settings.task_reward)
    return AdvantageTeacher(learner, distillation)
