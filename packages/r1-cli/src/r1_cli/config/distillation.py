"""Configuration sections `worker.teacher` and `algorithm.distillation`: distillation on policy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from r1_cli.config.files import names_folder, where_or_near
from r1_cli.config.problems import KeyProblem, KeyRemark
from r1_cli.config.section import NonNegative, Positive, Section, UserPath

TEACHER = "worker.teacher"
DISTILLATION = "algorithm.distillation"
PATH = f"{TEACHER}.model.model_path"


class TeacherModelConfig(Section):
    model_path: UserPath | None = None  # a frozen model that the run loads: a folder or a hub name
    trust_remote_code: bool = False


class TeacherConfig(Section):
    """The model that a run distils from; without one there is no distillation."""

    model: TeacherModelConfig = TeacherModelConfig()
    offload: bool = True  # its weights stay in host memory, each layer is copied to the device

    @property
    def used(self) -> bool:
        return self.model.model_path is not None

    def file_problems(self) -> Iterator[KeyProblem]:
        path = self.model.model_path
        if path and names_folder(path) and not Path(path).is_dir():
            yield PATH, f"no such folder{where_or_near(path)}"


class DistillationConfig(Section):
    """How the policy learns from its teacher, read only with a `worker.teacher`."""

    # advantage: coef · clip(log teacher − log policy) of each sampled token; loss: the divergence over the vocabulary
    form: Literal["advantage", "loss"] = "advantage"
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"  # the advantage estimates reverse_kl
    coef: NonNegative = 1.0  # weight of the teacher's term
    task_reward: bool = False  # add it to the task's advantages; false: it replaces them, and rewards are only shown
    clip: Positive = Field(default=10.0)  # nats, of form=advantage

    def problems(self, *, full_kl: bool, kl_in_reward: bool, critic: bool) -> Iterator[KeyProblem]:
        """Yield what does not go together in a run with a teacher, whose other parts are the arguments."""
        if self.form == "advantage" and self.divergence != "reverse_kl":
            message = "needs algorithm.distillation.form=loss: an advantage of sampled tokens estimates reverse_kl"
            yield f"{DISTILLATION}.divergence", message
        if self.form == "loss" and full_kl:
            message = "compares the policy with a reference over the vocabulary, as algorithm.distillation.form=loss "
            yield "algorithm.kl_penalty", f"{message}does with the teacher; set another, or algorithm.disable_kl=true"
        if self.task_reward:
            return
        if kl_in_reward:
            message = "distillation without the task's reward has no place for a KL in the reward, set true"
            yield "algorithm.use_kl_loss", message
        if critic:
            message = "trains a critic for the task's reward, which this distillation does not use; set grpo, or "
            yield "algorithm.adv_estimator", f"{message}{DISTILLATION}.task_reward=true"


REMARKS = (
    KeyRemark(DISTILLATION, "there is no worker.teacher", lambda v, c: not c.worker.teacher.used),
    KeyRemark(
        f"{DISTILLATION}.clip", "only form=advantage uses it", lambda v, c: c.algorithm.distillation.form != "advantage"
    ),
    KeyRemark("algorithm.adv_estimator", "the teacher's term replaces advantages", lambda v, c: not c.learns_task),
)
