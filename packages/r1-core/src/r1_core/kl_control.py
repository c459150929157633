"""Controllers of the KL coefficient: fixed, or adapted to a target KL.

Adaptive: error = clip(KL / target − 1, −0.2, 0.2), coef ← coef · (1 + error · samples / horizon).

arXiv 1909.08593 ("Fine-tuning language models from human preferences"). Assumes that a larger coefficient lowers the KL
within about `horizon` samples.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import Protocol

MAX_ERROR = 0.2

logger = logging.getLogger(__name__)


class KLController(Protocol):
    """An immutable controller; a checkpoint stores only its `coef`."""

    @property
    def coef(self) -> float: ...

    def update(self, divergence: float, samples: int) -> "KLController":
        """Return the controller for the next step, given a step's sample count and mean KL (nats)."""
        ...

    def resume(self, coef: float) -> "KLController":
        """Return the controller with a checkpoint's coefficient."""
        ...


@dataclass(frozen=True, slots=True)
class FixedKL:
    """A constant coefficient. `resume` returns itself, so that a changed setting counts."""

    coef: float

    def update(self, divergence: float, samples: int) -> "FixedKL":
        return self

    def resume(self, coef: float) -> "FixedKL":
        return self


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """Raises the coefficient while the KL exceeds `target` (nats per token), lowers it while the KL is below.

    A KL that is not finite leaves it unchanged, with a warning. `update` raises ValueError if `samples` is so large
    that the coefficient could reach 0.
    """

    coef: float
    target: float
    horizon: int

    def __post_init__(self) -> None:
        if self.target <= 0:
            raise ValueError(f"target is {self.target}; it must be above 0 nats")
        if self.horizon <= 0:
            raise ValueError(f"horizon is {self.horizon}; it must be above 0 samples")

    def update(self, divergence: float, samples: int) -> "AdaptiveKL":
        if not math.isfinite(divergence):
            logger.warning(
                "the mean KL is %s, so its coefficient stays %g; look at the log-probs of policy and reference",
                divergence, self.coef,
            )  # fmt: skip
            return self
        if MAX_ERROR * samples >= self.horizon:
            raise ValueError(
                f"horizon is {self.horizon} samples, and a step has {samples}: it must be above "
                f"{MAX_ERROR * samples:g}, or the coefficient would fall to 0"
            )
        error = min(max(divergence / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return replace(self, coef=self.coef * (1 + error * samples / self.horizon))

    def resume(self, coef: float) -> "AdaptiveKL":
        return replace(self, coef=coef)
