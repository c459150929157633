"""The teachers of a run: log-probs of sampled tokens for the advantages, or nothing if the loss compares with one."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from r1_cli.train.groups.group import Group
from r1_cli.train.types import Policy, Samples
from r1_core.advantages.distillation import Distillation
from r1_core.needs import OF_TEACHER
from r1_core.types import Sample

log = logging.getLogger("r1")

SAME = "the teacher gives every sampled token the policy's own log-prob: nothing is to be learned from the same model"


@dataclass(slots=True)
class AdvantageTeacher:
    """Distillation by advantages, from the learner's own teacher."""

    learner: Policy
    distillation: Distillation
    in_loss = False
    _told: set[str] = field(default_factory=set)

    def teach(self, samples: Samples, groups: Sequence[Group]) -> list[Sample]:
        read = self.learner.add_logprobs(samples, OF_TEACHER)
        return self.distillation.add(read, [True] * len(read))

    def metrics(self, samples: Samples, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        found = self.distillation.metrics(samples)
        if found["distillation/kl"] == 0 and found["distillation/without_teacher"] == 0:
            self._tell(SAME)
        return found

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            log.warning("%s", line)


class LossTeacher:
    """Distillation by the objective, which the learner computes from its own teacher."""

    in_loss = True

    def teach(self, samples: Samples, groups: Sequence[Group]) -> list[Sample]:
        return list(samples)

    def metrics(self, samples: Samples, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        measured = [update["distillation_loss"] for update in updates if "distillation_loss" in update]
        return {"distillation/divergence": fmean(measured)} if measured else {}
