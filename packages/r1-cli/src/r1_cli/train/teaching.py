"""The teachers of a run: log-probs of sampled tokens for the advantages, or nothing if the loss compares with one."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from r1_cli.train.groups.group import Group
from r1_cli.train.types import Policy, Samples
from r1_core.advantages.distillation import Distillation
from r1_core.needs import OF_TEACHER
from r1_core.types import Sample
from r1_rewards.types import RewardFailure
from r1_rollout.types import PromptLike, Reading

log = logging.getLogger("r1")

SAME = "the teacher gives every sampled token the policy's own log-prob: nothing is to be learned from the same model"


@dataclass(frozen=True, slots=True)
class TeacherModel:
    """One teacher. Without `reading` it is the learner's own, which reads samples as they are."""

    reading: Reading | None = None
    prompt_of: Callable[[Group], PromptLike] = lambda group: group.prompt  # as the teacher sees it


@dataclass(slots=True)
class AdvantageTeacher:
    """Distillation by advantages: each data source has a teacher, or none and the task's advantages alone.

    Args:
        find: the teacher of a data source.
        failure_share: of the tokens that have a teacher; if it gives no log-prob of more of them, the run ends.
    """

    learner: Policy
    distillation: Distillation
    find: Callable[[str], TeacherModel | None]
    temperature: float = 1.0
    failure_share: float = 0.1
    in_loss = False
    _told: set[str] = field(default_factory=set)

    def teach(self, samples: Samples, groups: Sequence[Group]) -> list[Sample]:
        teachers = [self._find(groups[sample.group_id]) for sample in samples]
        found = [replace(one, teacher_logprobs=_nothing(one)) for one in samples]
        for teacher in {id(one): one for one in teachers if one is not None}.values():
            places = [place for place, one in enumerate(teachers) if one is teacher]
            own = [samples[place] for place in places]
            read = self.learner.add_logprobs(own, OF_TEACHER) if teacher.reading is None else None
            read = self._read(teacher, teacher.reading, own, groups) if read is None and teacher.reading else read
            for place, sample in zip(places, read or own, strict=True):
                found[place] = sample
        self._require([one for one, teacher in zip(found, teachers, strict=True) if teacher is not None])
        return self.distillation.add(found, [teacher is not None for teacher in teachers])

    def _find(self, group: Group) -> TeacherModel | None:
        teacher = self.find(group.data_source)
        if teacher is None:
            self._tell(f"rows of {group.data_source} have no teacher: they train on the task's reward alone")
        return teacher

    def _read(
        self, teacher: TeacherModel, reading: Reading, samples: Sequence[Sample], groups: Sequence[Group]
    ) -> list[Sample]:
        """Return the samples with what the reading found; rows without an answer are asked for once more."""
        prompts: dict[int, PromptLike] = {}
        for sample in samples:
            if sample.group_id not in prompts:
                prompts[sample.group_id] = teacher.prompt_of(groups[sample.group_id])
        begins = [len(groups[sample.group_id].prompt.token_ids) for sample in samples]
        answers = [sample.token_ids[begin:].tolist() for sample, begin in zip(samples, begins, strict=True)]
        rows: list[list[float]] = [[] for _ in samples]
        for _ in range(2):
            asked = [i for i, row in enumerate(rows) if not row and answers[i]]
            if asked:
                of = [prompts[samples[i].group_id] for i in asked]
                new = reading.read_logprobs(of, [answers[i] for i in asked], [0] * len(asked), self.temperature)
                for i, row in zip(asked, new, strict=True):
                    rows[i] = row
        return [
            replace(sample, teacher_logprobs=_in_place(sample, begin, row))
            for sample, begin, row in zip(samples, begins, rows, strict=True)
        ]

    def _require(self, samples: Sequence[Sample]) -> None:
        total = sum(sample.response_length for sample in samples)
        missing = sum(int(_logprobs(one)[one.loss_mask].isnan().sum()) for one in samples)
        if missing > self.failure_share * total:
            raise RewardFailure(
                f"the teacher gave no log-prob of {missing:,} of {total:,} tokens, more than the share of "
                f"worker.teacher.failure_share={self.failure_share:g}; see the warnings above, and run the same "
                "command again when it answers"
            )

    def metrics(self, samples: Samples, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        found = self.distillation.metrics(samples)
        if found["distillation/kl"] == 0 and found["distillation/without_teacher"] == 0:
            self._tell(SAME)
        return found

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            log.warning("%s", line)


def _nothing(sample: Sample) -> Tensor:
    return torch.full(sample.loss_mask.shape, torch.nan)


def _logprobs(sample: Sample) -> Tensor:
    return _nothing(sample) if sample.teacher_logprobs is None else sample.teacher_logprobs


def _in_place(sample: Sample, begin: int, row: Sequence[float]) -> Tensor:
    """Return log-probs [L] of the tokens from `begin` on; NaN before, and everywhere if there are none."""
    found = _nothing(sample)
    if row:
        found[begin:] = torch.tensor(row)
    return found


class LossTeacher:
    """Distillation by the objective, which the learner computes from its own teacher."""

    in_loss = True

    def teach(self, samples: Samples, groups: Sequence[Group]) -> list[Sample]:
        return list(samples)

    def metrics(self, samples: Samples, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        measured = [update["distillation_loss"] for update in updates if "distillation_loss" in update]
        return {"distillation/divergence": fmean(measured)} if measured else {}
