"""Compute the advantages of a step's samples."""

from collections.abc import Sequence
from dataclasses import dataclass

from r1_cli.train.groups.group import Group, baselines, part_rewards
from r1_core.advantages import Estimator, assign
from r1_core.kl import FULL
from r1_core.losses import Correction
from r1_core.own import OwnCodeError
from r1_core.types import Sample


class AdvantageError(Exception):
    """The advantages of a step cannot be computed. The learner has not changed."""


@dataclass(frozen=True, slots=True)
class AdvantageComputer:
    """An estimator with the KL in the reward and the correction for the engine's log-probs."""

    estimator: Estimator
    kl_penalty: str | None = None  # in the reward; None: in the loss or nowhere
    correction: Correction | None = None

    @property
    def needs(self) -> frozenset[str]:
        needs = {*self.estimator.needs}
        if self.correction is None:
            needs.discard("correction_weights")
        elif "correction_weights" in needs:
            needs.add("old_logprobs")
        if self.kl_penalty is not None:
            needs |= {"old_logprobs", "full_kl" if self.kl_penalty == FULL else "ref_logprobs"}
        return frozenset(needs)

    def __call__(self, samples: Sequence[Sample], groups: Sequence[Group], kl_coef: float) -> list[Sample]:
        """Return the samples of `groups` with their advantages. Raises AdvantageError if the estimator raises."""
        needs = self.needs
        try:
            return assign(
                samples,
                self.estimator,
                baselines=baselines(groups) if "baselines" in needs else None,
                parts=part_rewards(groups) if "parts" in needs else None,
                correction=self.correction if "correction_weights" in needs else None,
                kl_penalty=self.kl_penalty,
                kl_coef=kl_coef,
            )
        except OwnCodeError as error:  # names the user's file and line
            raise AdvantageError(str(error)) from error
        except Exception as error:
            name = type(self.estimator).__name__
            raise AdvantageError(f"the estimator {name} fails: {type(error).__name__}: {error}") from error
