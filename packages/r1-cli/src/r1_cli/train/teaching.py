"""The teachers of a run: log-probs of sampled tokens for the advantages, or nothing if the loss compares with one."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from r1_cli.train.groups.group import Group
from r1_cli.train.types import Policy, Samples
from r1_core.advantages.distillation import Distillation, missing_share
from r1_core.needs import OF_TEACHER
from r1_core.types import Sample
from r1_data.types import DataError
from r1_rewards.types import RewardFailure
from r1_rollout.types import PromptLike, Reading

log = logging.getLogger("r1")

SAME = "the teacher gives every sampled token the policy's own log-prob: nothing is to be learned from the same model"


# (prompts, answers) -> of each answer's tokens their log-probs, those of the k most likely tokens, and their ids,
# [n, 1 + 2k]; [0] without a reply.
ReadTop = Callable[[Sequence[PromptLike], Sequence[Sequence[int]]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class TeacherModel:
    """One teacher. Without `reading` it is the learner's own, which reads samples as they are."""

    reading: Reading | None = None
    prompt_of: Callable[[Group], PromptLike] = lambda group: group.prompt  # as the teacher sees it
    read_top: ReadTop | None = None


@dataclass(slots=True)
class Teachers:
    """Reads the samples of a step by the teacher that each data source has, if it has one.

    Args:
        find: the teacher of a data source.
        failure_share: of the tokens that have a teacher; if it gives no log-prob of more of them, the run ends.
        topk: of the most likely tokens that a teacher lists; 0: none.
    """

    learner: Policy
    find: Callable[[str], TeacherModel | None]
    temperature: float = 1.0
    failure_share: float = 0.1
    topk: int = 0
    _told: set[str] = field(default_factory=set)

    def read(self, samples: Samples, groups: Sequence[Group]) -> tuple[list[Sample], list[bool]]:
        """Return the samples with what their teachers give, NaN without, and whether they have one.

        Raises RewardFailure if too many tokens have no log-prob.
        """
        teachers = [self._find(groups[sample.group_id]) for sample in samples]
        found = [with_top(one, None, self.topk) for one in samples]
        for teacher in {id(one): one for one in teachers if one is not None}.values():
            places = [place for place, one in enumerate(teachers) if one is teacher]
            own = [samples[place] for place in places]
            if teacher.reading is None:
                read = self.learner.add_logprobs(own, ["teacher_top"] if self.topk else OF_TEACHER - {"teacher_top"})
            else:
                read = self._read(teacher, teacher.reading, own, groups)
            for place, sample in zip(places, read, strict=True):
                found[place] = sample
        self._require([one for one, teacher in zip(found, teachers, strict=True) if teacher is not None])
        return found, [teacher is not None for teacher in teachers]

    def _find(self, group: Group) -> TeacherModel | None:
        teacher = self.find(group.data_source)
        if teacher is None:
            self.tell(f"rows of {group.data_source} have no teacher: they train on the task's reward alone")
        return teacher

    def _read(
        self, teacher: TeacherModel, reading: Reading, samples: Sequence[Sample], groups: Sequence[Group]
    ) -> list[Sample]:
        """Return the samples with what the reading found; rows without an answer are asked for once more."""
        for sample in samples:
            _require_plain(sample, groups[sample.group_id])
        wanted = dict.fromkeys(sample.group_id for sample in samples)
        prompts = {place: prompt for place in wanted if (prompt := self._render(teacher, groups[place])) is not None}
        begins = [len(groups[sample.group_id].prompt.token_ids) for sample in samples]
        answers = [sample.token_ids[begin:].tolist() for sample, begin in zip(samples, begins, strict=True)]
        rows: list[Tensor | None] = [None] * len(samples)
        for _ in range(2):
            asked = [i for i, row in enumerate(rows) if row is None and answers[i] and samples[i].group_id in prompts]
            if asked:
                of = [prompts[samples[i].group_id] for i in asked]
                new = self._ask(teacher, reading, of, [answers[i] for i in asked])
                for i, row in zip(asked, new, strict=True):
                    rows[i] = row if len(row) else None
        return [with_top(sample, row, self.topk) for sample, row in zip(samples, rows, strict=True)]

    def _render(self, teacher: TeacherModel, group: Group) -> PromptLike | None:
        """Return the teacher's prompt; None with a warning if its row no longer gives one."""
        try:
            return teacher.prompt_of(group)
        except DataError as error:
            self.tell(f"the teacher cannot be shown a row, and perhaps more: {error}")
            return None

    def _ask(
        self, teacher: TeacherModel, reading: Reading, prompts: Sequence[PromptLike], answers: Sequence[list[int]]
    ) -> list[Tensor]:
        if self.topk and teacher.read_top:
            return teacher.read_top(prompts, answers)
        found = reading.read_logprobs(prompts, answers, [0] * len(answers), self.temperature)
        return [torch.tensor(row)[:, None] for row in found]

    def _require(self, samples: Sequence[Sample]) -> None:
        total = sum(sample.response_length for sample in samples)
        missing = sum(int(_logprobs(one)[one.loss_mask].isnan().sum()) for one in samples)
        if missing > self.failure_share * total:
            raise RewardFailure(
                f"the teacher gave no log-prob of {missing:,} of {total:,} tokens, more than the share of "
                f"worker.teacher.failure_share={self.failure_share:g}; see the warnings above, and run the same "
                "command again when it answers"
            )

    def tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            log.warning("%s", line)


@dataclass(frozen=True, slots=True)
class AdvantageTeacher:
    """Distillation by advantages: each data source has a teacher, or none and the task's advantages alone."""

    teachers: Teachers
    distillation: Distillation
    in_loss = False

    def teach(self, samples: Samples, groups: Sequence[Group]) -> list[Sample]:
        return self.distillation.add(*self.teachers.read(samples, groups))

    def metrics(self, samples: Samples, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        found = self.distillation.metrics(samples)
        if found.get("distillation/kl") == 0 and found["distillation/without_teacher"] == 0:
            self.teachers.tell(SAME)
        return found


def _require_plain(sample: Sample, group: Group) -> None:
    """Raise RewardFailure for a sample that is not the group's prompt with text behind it."""
    prompt = list(group.prompt.token_ids)
    forked = sample.token_ids[: len(prompt)].tolist() != prompt
    if forked or sample.later_inputs:
        found = "forks of an episode" if forked else "pictures behind the prompt of an episode"
        raise RewardFailure(
            f"{group.prompt.id}: a teacher on servers, in the main process or with its own prompt reads no {found}: "
            "use one that the learner holds, worker.teacher.model.model_path without context, image_key and limits of "
            "pixels"
        )


def _logprobs(sample: Sample) -> Tensor:
    nothing = torch.full(sample.loss_mask.shape, torch.nan)
    return nothing if sample.teacher_logprobs is None else sample.teacher_logprobs


def with_top(sample: Sample, row: Tensor | None, topk: int) -> Sample:
    """Return the sample with the columns of `row` [n, 1 + 2 · topk] at its last n tokens, NaN before and without."""
    found = torch.full((len(sample.token_ids), 1 + 2 * topk), torch.nan)
    if row is not None:
        found[len(found) - len(row) :] = row
    if not topk:
        return replace(sample, teacher_logprobs=found[:, 0])
    ids = found[:, 1 + topk :].nan_to_num(-1.0).int()
    return replace(
        sample, teacher_logprobs=found[:, 0], teacher_top=found[:, 1 : 1 + topk].contiguous(), teacher_top_ids=ids
    )


class LossTeacher:
    """Distillation by the objective, which the learner computes from its own teacher."""

    in_loss = True

    def teach(self, samples: Samples, groups: Sequence[Group]) -> list[Sample]:
        return list(samples)

    def metrics(self, samples: Samples, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return _divergence(updates)


@dataclass(frozen=True, slots=True)
class TopTeacher:
    """Distillation by the objective from the most likely tokens that teachers list."""

    teachers: Teachers
    task_reward: bool = False
    in_loss = True

    def teach(self, samples: Samples, groups: Sequence[Group]) -> list[Sample]:
        found, taught = self.teachers.read(samples, groups)
        if self.task_reward:
            return found
        return [
            replace(one, advantages=torch.zeros(one.loss_mask.shape)) if has_teacher else one
            for one, has_teacher in zip(found, taught, strict=True)
        ]

    def metrics(self, samples: Samples, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        found = _divergence(updates)
        if samples:
            found["distillation/without_teacher"] = missing_share(samples)
        if found.get("distillation/divergence") == 0 and found.get("distillation/without_teacher") == 0:
            self.teachers.tell(SAME)
        return found


def _divergence(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    measured = [update["distillation_loss"] for update in updates if "distillation_loss" in update]
    return {"distillation/divergence": fmean(measured)} if measured else {}
