"""Configuration sections `worker.teacher` and `algorithm.distillation`: distillation on policy."""

import re
from collections.abc import Iterator
from os.path import isdir, isfile
from typing import Literal

from pydantic import Field, field_validator

from r1_cli.config.files import ModelPath, names_folder, where_or_near
from r1_cli.config.problems import KeyProblem, KeyRemark
from r1_cli.config.section import Count, NonNegative, Positive, Ratio, Section, UserPath

TEACHER = "worker.teacher"
POLICY = "policy"  # in place of a path: the policy itself
DISTILLATION = "algorithm.distillation"
Pixels = tuple[int | None, int | None]  # the fewest and the most
RATE = re.compile(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?")
PATH = f"{TEACHER}.model.model_path"


class TeacherModelConfig(Section):
    # a frozen model that the run loads: a folder or a hub name; policy: the policy itself, with a prompt of its own
    model_path: ModelPath | None = None
    trust_remote_code: bool = False  # run Python code from the teacher's repository


class OneTeacherConfig(Section):
    """A teacher: a model that the run loads, the policy itself, or servers."""

    model: TeacherModelConfig = TeacherModelConfig()
    urls: str | None = None  # equal OpenAI-compatible vLLM servers, separated by commas, in place of `model`
    served_name: str | None = None  # the model's name there; null: the only one
    tokenizer_path: UserPath | None = None  # of servers that do not answer /tokenize
    token_env: str = "OPENAI_API_KEY"  # variable of the environment with the servers' token
    # a Jinja file whose text the teacher sees besides the prompt; sees content, answer and every column
    context: UserPath | None = None
    # rewrite: that message; before: it stays, and the text stands before the whole prompt, as a system message
    style: Literal["rewrite", "before"] = "rewrite"
    min_pixels: Count | None = None  # of the teacher's pictures; null: as the policy's
    max_pixels: Count | None = None  # likewise; more than the policy's: a sharper picture
    image_key: str | None = None  # column with the teacher's pictures, as many as the policy's; null: the policy's

    @property
    def used(self) -> bool:
        return self.model.model_path is not None or self.urls is not None

    @property
    def privileged(self) -> bool:
        """Whether it sees another prompt than the policy."""
        return bool(self.context or self.min_pixels or self.max_pixels or self.image_key)

    @property
    def loaded(self) -> str | None:
        """The path of the model that the run loads for it."""
        path = self.model.model_path
        return None if path == POLICY else path

    def problems(self, key: str, temperature: float, pixels: Pixels, *, same: bool) -> Iterator[KeyProblem]:
        """Yield what is wrong.

        Args:
            pixels: `min_pixels` and `max_pixels` of `data`, which hold unless this teacher has its own.
            same: the policy as a teacher has its weights of the step.
        """
        path = self.model.model_path
        if not self.used:
            yield f"{key}.model.model_path", "is missing: name a model, policy, or servers in urls"
        if path and self.urls:
            yield f"{key}.urls", "stands in place of model.model_path; set one of them"
        if path == POLICY and same and not self.privileged:
            message = "is its own teacher, so it needs a prompt of its own: set context, max_pixels or image_key, or "
            message += f"other weights: {DISTILLATION}.sync"
            yield f"{key}.model.model_path", message
        if path and path != POLICY and names_folder(path) and not isdir(path):
            yield f"{key}.model.model_path", f"no such folder{where_or_near(path)}"
        if self.context and not isfile(self.context):
            yield f"{key}.context", f"no such file{where_or_near(self.context)}"
        if self.style != "rewrite" and not self.context:
            yield f"{key}.style", "says where the text of a context stands, and there is none: set context"
        yield from self._pixel_problems(key, *pixels)
        if self.urls and temperature != 1.0:
            message = f"servers give log-probs at temperature 1, and worker.rollout.temperature is {temperature:g}"
            yield f"{key}.urls", message

    def _pixel_problems(self, key: str, own_least: int | None, own_most: int | None) -> Iterator[KeyProblem]:
        least, most = self.min_pixels or own_least, self.max_pixels or own_most
        if not (self.min_pixels or self.max_pixels) or least is None or most is None or least <= most:
            return
        if self.min_pixels:
            yield f"{key}.min_pixels", f"must be at most {key if self.max_pixels else 'data'}.max_pixels ({most})"
        else:
            yield f"{key}.max_pixels", f"must be at least data.min_pixels ({least}): set {key}.min_pixels, too"


class TeacherConfig(OneTeacherConfig):
    """What a run distils from; without a teacher there is no distillation."""

    # by data source, in place of the teacher above; null: that source trains on the task's reward alone
    sources: dict[str, OneTeacherConfig | None] = Field(default_factory=dict)
    # tokens of the longest prompt of a teacher that sees more than the policy; null: no limit
    max_prompt_length: Count | None = None
    offload: bool = True  # weights of a loaded teacher stay in host memory, each layer is copied to the device
    # of a step's tokens that may lack a log-prob because servers failed; above, the run ends
    failure_share: Ratio = 0.1

    @property
    def used(self) -> bool:
        return super().used or any(self.sources.values())

    def of(self, source: str) -> OneTeacherConfig | None:
        """Return the teacher of a data source, or None."""
        if source in self.sources:
            return self.sources[source]
        return self if super().used else None

    @property
    def every(self) -> dict[str, OneTeacherConfig]:
        """All teachers by their key, the default first."""
        found: dict[str, OneTeacherConfig] = {TEACHER: self} if super().used else {}
        return found | {f"{TEACHER}.sources.{name}": one for name, one in self.sources.items() if one is not None}

    @property
    def covers_all(self) -> bool:
        """Whether every data source has a teacher."""
        return super().used and None not in self.sources.values()

    @property
    def is_policy(self) -> bool:
        """Whether the policy teaches itself, for some source."""
        return any(one.model.model_path == POLICY for one in self.every.values())

    @property
    def in_learner(self) -> str | None:
        """The path of the model that the learner holds: the first that is to be loaded, unless that is the policy."""
        return None if self.is_policy else next((one.loaded for one in self.every.values() if one.loaded), None)

    @property
    def in_main_process(self) -> list[str]:
        """The paths of the models that are loaded beside the learner's, one a teacher."""
        held = self.in_learner
        return [one.loaded for one in self.every.values() if one.loaded and one.loaded != held]

    @property
    def read_by_learner(self) -> list[OneTeacherConfig]:
        """The teachers whose log-probs the learner computes."""
        held = POLICY if self.is_policy else self.in_learner
        return [one for one in self.every.values() if one.model.model_path and one.model.model_path == held]

    def all_problems(self, temperature: float, sync: "int | str", pixels: Pixels) -> Iterator[KeyProblem]:
        for key, one in self.every.items():
            yield from one.problems(key, temperature, pixels, same=sync == 1)


class DistillationConfig(Section):
    """How the policy learns from its teacher, read only with a `worker.teacher`."""

    # advantage: coef · clip(log teacher − log policy) of each sampled token; loss: the divergence over the vocabulary
    form: Literal["advantage", "loss"] = "advantage"
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"  # the advantage estimates reverse_kl
    # of form=loss: the teacher gives its k most likely tokens, which servers can, and not all logits; with forward_kl
    topk: Count | None = None
    coef: NonNegative = 1.0  # weight of the teacher's term
    # of a teacher that is the policy: N: its weights every N steps; never: those at the start; ema:0.01: a running mean
    # that takes 0.01 of the policy after each optimizer step
    sync: Count | str = 1
    task_reward: bool = False  # add it to the task's advantages; false: it replaces them, and rewards are only shown
    clip: Positive = Field(default=10.0)  # nats, of form=advantage

    @property
    def syncs(self) -> tuple[int, float]:
        """The steps after which such a teacher has the policy's weights, 0: never; and its rate, else 0."""
        if isinstance(self.sync, int):
            return self.sync, 0.0
        return 0, 0.0 if self.sync == "never" else float(self.sync.removeprefix("ema:"))

    @field_validator("sync", mode="before")
    @classmethod
    def _read_sync(cls, value: object) -> object:
        if isinstance(value, str) and value.isdigit():  # a word of the command line
            return int(value)
        if isinstance(value, str) and value != "never":
            rate = value.removeprefix("ema:") if value.startswith("ema:") else ""
            if not RATE.fullmatch(rate) or not 0 < float(rate) <= 1:
                raise ValueError(
                    "must be never, a number of steps, or ema: and a rate above 0, at most 1, as in ema:0.01"
                )
        return value

    def problems(
        self, teacher: TeacherConfig, *, full_kl: bool, kl_in_reward: bool, critic: bool
    ) -> Iterator[KeyProblem]:
        """Yield what does not go together in a run with a teacher, whose other parts are the arguments."""
        alone = teacher.loaded and not (teacher.sources or teacher.urls or teacher.privileged)
        if self.form == "loss" and not (self.topk or alone):
            message = "needs all logits of one teacher, which the run loads and which sees the policy's prompts: set "
            yield (
                f"{DISTILLATION}.form",
                f"{message}{PATH} alone, or topk with divergence=forward_kl, or form=advantage",
            )
        if self.topk and self.form != "loss":
            yield f"{DISTILLATION}.topk", "needs algorithm.distillation.form=loss"
        elif self.topk and self.divergence != "forward_kl":
            message = "is not computed over a teacher's topk tokens: the policy would lower it by moving to the tokens "
            message += "that are not listed, and fail with a falling loss (verl #5041); set forward_kl, or topk=null"
            yield f"{DISTILLATION}.divergence", message
        if self.form == "advantage" and self.divergence != "reverse_kl":
            message = "needs algorithm.distillation.form=loss: an advantage of sampled tokens estimates reverse_kl"
            yield f"{DISTILLATION}.divergence", message
        if self.form == "loss" and full_kl:
            message = "compares the policy with a reference over the vocabulary, as algorithm.distillation.form=loss "
            yield "algorithm.kl_penalty", f"{message}does with the teacher; set another, or algorithm.disable_kl=true"
        if self.task_reward or not teacher.covers_all:
            return
        if kl_in_reward:
            message = "distillation without the task's reward has no place for a KL in the reward, set true"
            yield "algorithm.use_kl_loss", message
        if critic:
            message = "trains a critic for the task's reward, which this distillation does not use; set grpo, or "
            yield "algorithm.adv_estimator", f"{message}{DISTILLATION}.task_reward=true"


def unscored_problems(filters: bool, draws_online: bool) -> Iterator[KeyProblem]:
    """Yield what reads rewards in a run that has none."""
    message = "reads the answers' rewards, and there is no worker.reward.reward_function: name one, or set "
    if filters:
        yield "algorithm.online_filtering", f"{message}false"
    if draws_online:
        yield "data.curriculum.by", f"{message}pass_rate or null"


REMARKS = (
    KeyRemark(DISTILLATION, "there is no worker.teacher", lambda v, c: not c.worker.teacher.used),
    KeyRemark(
        f"{DISTILLATION}.clip", "only form=advantage uses it", lambda v, c: c.algorithm.distillation.form != "advantage"
    ),
    KeyRemark(
        f"{DISTILLATION}.sync", "only a teacher that is the policy has it", lambda v, c: not c.worker.teacher.is_policy
    ),
    KeyRemark(
        f"{TEACHER}.max_prompt_length",
        "every teacher sees the policy's prompts",
        lambda v, c: not any(one.privileged for one in c.worker.teacher.every.values()),
    ),
    KeyRemark("algorithm.adv_estimator", "the teacher's term replaces advantages", lambda v, c: not c.learns_task),
)
