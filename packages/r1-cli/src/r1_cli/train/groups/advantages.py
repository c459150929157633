"""From groups to the advantages of their samples, with what the estimator needs to know of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from r1_cli.train.groups.group import Group, baselines, part_rewards
from r1_core.advantages import Estimator, assign
from r1_core.kl import FULL
from r1_core.losses import Correction
from r1_core.own import OwnCodeError
from r1_core.types import Sample


class AdvantageError(Exception):
    """No advantages can be had from a step's samples; the learner is as it was before them."""


@dataclass(frozen=True, slots=True)
class AdvantageComputer:
    """An estimator, and what else goes into advantages: the KL in the reward and the correction of the engine's gap."""

    estimator: Estimator
    kl_penalty: str | None = None  # in the reward; None: it stands in the loss or nowhere
    correction: Correction | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What must be known of the samples before they get their advantages."""
        needs = {*self.estimator.needs}
        if self.correction is None:
            needs.discard("correction_weights")
        elif "correction_weights" in needs:
            needs.add("old_logprobs")
        if self.kl_penalty is not None:
            needs |= {"old_logprobs", "full_kl" if self.kl_penalty == FULL else "ref_logprobs"}
        return frozenset(needs)

    def __call__(self, samples: Sequence[Sample], groups: Sequence[Group], kl_coef: float) -> list[Sample]:
        """Return the samples of the groups, as `to_samples` gives them, with their advantages.

        Raises:
            EstimateError: the estimator raises.
        """
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
        except OwnCodeError as error:  # which names the user's file and line by itself
            raise AdvantageError(str(error)) from error
        except Exception as error:
            name = type(self.estimator).__name__
            raise AdvantageError(f"the estimator {name} fails: {type(error).__name__}: {error}") from error
