"""The learner of a run on many devices, as the driver sees it: it holds no weight, and asks the ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from r1_cli.cluster.crossing import Crossing
from r1_cli.cluster.ranks import Ranks
from r1_cli.cluster.saving import RankedSnapshot
from r1_cli.cluster.weights import RankedWeights
from r1_core.learner.batching import Layout, MicroLimit
from r1_core.learner.profiling import PassProfile, merge_profiles
from r1_core.learner.trainable import LearnerInfo
from r1_core.needs import OF_POLICY, OF_REFERENCE, Needs
from r1_core.objective import Objective
from r1_core.types import Sample
from r1_rollout.lora import Adapter


class RankedLearner:
    """The `Learner` of `r1_cli.train.roles`, whose verbs all ranks carry out together.

    The objective is what the ranks have built from the configuration; of the one that a verb is given only `kl_coef`
    crosses.

    Args:
        inputs_dtype: what the model computes in, and its floating-point inputs cross in; None: as they are.
        neighbours: ranks that share a machine, at most.
    """

    def __init__(self, ranks: Ranks, inputs_dtype: torch.dtype | None = None, neighbours: int = 1) -> None:
        self._ranks = ranks
        self.crossing = Crossing(ranks, inputs_dtype, neighbours)
        self._ask = self.crossing.ask

    @cached_property
    def _form(self) -> Adapter | None:
        """What an adapter is like that is trained in place of the weights."""
        form: Adapter | None = self._ask("adapter")
        return form

    # --- the verbs of `roles.Learner` --------------------------------------------------------------------------------

    def add_logprobs(self, samples: Sequence[Sample], needs: Needs) -> list[Sample]:
        """Add what `needs` asks for and a forward pass finds."""
        asked = sorted((OF_POLICY | OF_REFERENCE) & set(needs))
        if not samples or not asked:
            return list(samples)
        rows, changes = self.crossing.show(samples)
        return self.crossing.attach(rows, samples, self._ask("add_logprobs", rows, changes, asked))

    def compute_logprobs_together(self, samples: Sequence[Sample], *, padding_free: bool) -> list[list[float]]:
        """Return the policy's log-probs of each sample's trained tokens, all samples in one micro-batch.

        Raises what the model does that cannot read them so; the ranks go on.
        """
        shown = self.crossing.show(samples)
        found: list[list[float]] | Exception = self._ask("compute_logprobs_together", *shown, padding_free)
        if isinstance(found, Exception):
            raise found
        return found

    def compute_eager_logprobs(self, samples: Sequence[Sample], noise: torch.dtype | None = None) -> list[list[float]]:
        """Return what `compute_logprobs_together` should: by the policy's own eager forward of each sample alone."""
        found: list[list[float]] | Exception = self._ask("compute_eager_logprobs", *self.crossing.show(samples), noise)
        if isinstance(found, Exception):
            raise found
        return found

    def set_layout(self, layout: Layout, *, own_attention: bool = False) -> None:
        """Lay micro-batches out so, whatever the configuration says."""
        self._ask("set_layout", layout, own_attention)

    def set_micro_batch_limits(self, train: MicroLimit, inference: MicroLimit) -> None:
        """Hold so much in a micro-batch from now on, with a gradient and without."""
        self._ask("set_micro_batch_limits", train, inference)

    def profile_pass(self, samples: Sequence[Sample], objective: Objective | None, limit: MicroLimit) -> PassProfile:
        """Compute the samples and forget it; return what it took on the rank that it took most of."""
        rows, changes = self.crossing.show(samples)
        kl_coef = None if objective is None else objective.kl_coef
        return merge_profiles(self.crossing.ask_all("profile_pass", rows, changes, kl_coef, limit))

    def forward_backward(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Add the gradient of the samples, normalised over all of them; return the loss's metrics."""
        metrics: dict[str, float] = self._ask("forward_backward", *self.crossing.show(samples), objective.kl_coef)
        return metrics

    def forward_backward_on_policy(
        self, samples: Sequence[Sample], objective: Objective
    ) -> tuple[list[Sample], dict[str, float]]:
        """Do what `add_logprobs` and `forward_backward` do, in one forward pass."""
        rows, changes = self.crossing.show(samples)
        found, metrics = self._ask("forward_backward_on_policy", rows, changes, objective.kl_coef)
        return self.crossing.attach(rows, samples, found), metrics

    def optim_step(self) -> dict[str, float]:
        """Clip, update, forget the gradient; return grad_norm and lr."""
        metrics: dict[str, float] = self._ask("optim_step")
        return metrics

    def zero_weights(self, rows: Mapping[str, Sequence[int] | None]) -> None:
        """Set rows of the weights (None: all of a tensor) to zero until `restore_weights`."""
        self._ask("zero_weights", dict(rows))

    def restore_weights(self) -> None:
        """Give the weights that `zero_weights` has set to zero their values back; without any, do nothing."""
        self._ask("restore_weights")

    def offload(self) -> None:
        """Let all that is offloaded leave the devices, until the verb that needs it."""
        self._ask("offload")

    def describe(self) -> LearnerInfo:
        """Return what is asked about model and devices; memory is that of the rank that took most."""
        info: list[LearnerInfo] = self._ranks.ask_all("describe")
        return replace(
            info[0],
            devices=len(info),
            peak_allocated=max((one.peak_allocated for one in info if one.peak_allocated is not None), default=None),
            peak_reserved=max((one.peak_reserved for one in info if one.peak_reserved is not None), default=None),
        )

    def snapshot(self, *, model_only: bool = False, max_bytes: int | None = None) -> RankedSnapshot | None:
        """Copy weights and optimizer on the ranks; None if a machine would need more than `max_bytes`."""
        return self.crossing.take_snapshot("learner", model_only, max_bytes)

    def save(self, folder: Path, *, model_only: bool = False) -> None:
        """Let the ranks write weights and optimizer into `folder`."""
        self._ask("save", folder, model_only)

    def load(self, folder: Path, *, model_only: bool = False) -> None:
        """Let the ranks read what any number of ranks saved."""
        self._ask("load", folder, model_only)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Bring the weights, or an adapter's factors, here, a bucket of whole tensors after the other."""
        return self.source(0).pairs()

    def source(self, version: int) -> RankedWeights:
        """Return the weights where they are, to be called by this version."""
        return RankedWeights(self._ask, self._ranks.putter, version, self._form)
