"""The critic of a run on many devices, as the driver sees it: it stands on the learner's ranks, beside the policy."""

from collections.abc import Sequence
from pathlib import Path

from r1_cli.cluster.crossing import Crossing
from r1_cli.cluster.saving import RankedSnapshot
from r1_core.learner.batching import Layout, MicroLimit
from r1_core.learner.profiling import PassProfile, merge_profiles
from r1_core.types import Sample


class RankedCritic:
    """A `Critic` whose methods run on all ranks, on the batch that the learner has."""

    def __init__(self, crossing: Crossing) -> None:
        self._crossing = crossing

    def add_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Add the forecast before each trained token."""
        if not samples:
            return []
        rows, changes = self._crossing.show(samples)
        return self._crossing.attach(rows, samples, self._crossing.ask("add_values", rows, changes))

    def set_layout(self, layout: Layout, *, own_attention: bool = False) -> None:
        """Lay micro-batches out so, whatever the configuration says."""
        self._crossing.ask("critic_set_layout", layout, own_attention)

    def set_micro_batch_limits(self, train: MicroLimit, inference: MicroLimit) -> None:
        """Hold so much in a micro-batch from now on, with a gradient and without."""
        self._crossing.ask("critic_set_micro_batch_limits", train, inference)

    def profile_pass(self, samples: Sequence[Sample], limit: MicroLimit, *, gradient: bool) -> PassProfile:
        """Compute the samples and forget it; return what it took on the rank that it took most of."""
        rows, changes = self._crossing.show(samples)
        return merge_profiles(self._crossing.ask_all("critic_profile_pass", rows, changes, limit, gradient))

    def forward_backward(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the gradient of the samples, normalised over all of them; return the loss's metrics."""
        metrics: dict[str, float] = self._crossing.ask("critic_forward_backward", *self._crossing.show(samples))
        return metrics

    def optim_step(self) -> dict[str, float]:
        """Clip, update, forget the gradient; return grad_norm and lr."""
        metrics: dict[str, float] = self._crossing.ask("critic_optim_step")
        return metrics

    def offload(self) -> None:
        """Let all that is offloaded leave the devices, until the verb that needs it."""
        self._crossing.ask("critic_offload")

    def snapshot(self, *, model_only: bool = False, max_bytes: int | None = None) -> RankedSnapshot | None:
        """Let the ranks copy weights and optimizer, as `RankedLearner.snapshot` does."""
        return self._crossing.take_snapshot("critic", model_only, max_bytes)

    def save(self, folder: Path, *, model_only: bool = False) -> None:
        """Let the ranks write weights and optimizer into `folder`."""
        self._crossing.ask("critic_save", folder, model_only)

    def load(self, folder: Path, *, model_only: bool = False) -> None:
        """Let the ranks read what any number of ranks saved."""
        self._crossing.ask("critic_load", folder, model_only)
