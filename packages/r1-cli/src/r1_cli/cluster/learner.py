"""The learner of a run on many devices, as the driver sees it: it holds no weight, and asks the ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r1_cli.cluster.batch import Array, Reference, find_changes, in_place, to_columns
from r1_cli.cluster.ranks import Ranks
from r1_cli.cluster.weights import RankedWeights
from r1_core.learner.facts import Facts
from r1_core.needs import OF_POLICY, OF_REFERENCE, Needs
from r1_core.objective import Objective
from r1_core.rows import with_tokens
from r1_core.types import PER_TOKEN, Sample
from r1_rollout.lora import Adapter

FORGOTTEN: dict[str, Any] = dict.fromkeys(PER_TOKEN)


class RankedLearner:
    """The `Learner` of `r1_cli.roles`, whose verbs all ranks carry out together.

    The ranks keep the samples of the last batch, and are only told what is new: samples that they have are known by
    their `token_ids`, which `dataclasses.replace` keeps, and fields as objects. The objective is what the ranks have
    built from the configuration; of the one that a verb is given only `kl_coef` crosses.

    Args:
        inputs_dtype: what the model computes in, and its floating-point inputs cross in; None: as they are.
    """

    def __init__(self, ranks: Ranks, inputs_dtype: torch.dtype | None = None) -> None:
        self._ranks, self._inputs_dtype = ranks, inputs_dtype
        self._error: Exception | None = None  # the first that the ranks have raised
        self._batch: list[Sample] = []  # as the ranks have it
        self._rows: dict[int, int] = {}  # of the batch, by the identity of a sample's `token_ids`

    def _ask(self, verb: str, *args: Any) -> Any:
        """Ask all ranks. What fails after an error fails for its reason, as ranks may be gone: it is raised again."""
        try:
            return self._ranks.ask(verb, *args)
        except Exception as error:
            if self._error is not None:
                raise self._error from error
            self._error = error
            raise

    @cached_property
    def _form(self) -> Adapter | None:
        """What an adapter is like that is trained in place of the weights."""
        form: Adapter | None = self._ask("adapter")
        return form

    # --- samples -----------------------------------------------------------------------------------------------------

    def _show(self, samples: Sequence[Sample]) -> tuple[Array, Reference | None]:
        """Let the ranks have these samples; return their rows in the batch, and what is new of them."""
        rows = self._find(samples)
        if rows is None:
            self._ask("take", self._ranks.put(to_columns(samples, self._ranks.put, self._inputs_dtype)))
            self._batch = [replace(sample, **FORGOTTEN) for sample in samples]
            self._rows = {id(sample.token_ids): row for row, sample in enumerate(samples)}
            rows = list(range(len(samples)))
        changes = find_changes(self._batch, samples, rows)
        self._keep(rows, samples)
        return np.array(rows, np.int32), self._ranks.put(changes) if changes else None

    def _find(self, samples: Sequence[Sample]) -> list[int] | None:
        """The rows of samples that the ranks have, None if they lack one."""
        rows = [self._rows.get(id(sample.token_ids), -1) for sample in samples]
        if len(set(rows)) < len(rows) or any(
            row < 0
            or self._batch[row].loss_mask is not sample.loss_mask
            or self._batch[row].position_ids is not sample.position_ids
            or self._batch[row].model_inputs is not sample.model_inputs
            for row, sample in zip(rows, samples, strict=True)
        ):
            return None
        return rows

    def _keep(self, rows: Sequence[int], samples: Sequence[Sample]) -> None:
        for row, sample in zip(rows, samples, strict=True):
            self._batch[row] = sample

    def _attach(self, rows: Array, samples: Sequence[Sample], found: Mapping[str, Array]) -> list[Sample]:
        """Set what rank 0 has found; all ranks have it, too."""
        annotated = with_tokens(samples, **{name: in_place(values) for name, values in found.items()})
        self._keep(rows.tolist(), annotated)
        return annotated

    # --- the verbs of `roles.Learner` --------------------------------------------------------------------------------

    def annotate(self, samples: Sequence[Sample], needs: Needs) -> list[Sample]:
        """Add what `needs` asks for and a forward pass finds."""
        asked = sorted((OF_POLICY | OF_REFERENCE) & set(needs))
        if not samples or not asked:
            return list(samples)
        rows, changes = self._show(samples)
        return self._attach(rows, samples, self._ask("annotate", rows, changes, asked))

    def logprobs_together(self, samples: Sequence[Sample], *, padding_free: bool) -> list[list[float]]:
        """Return the policy's log-probs of each sample's trained tokens, all samples in one micro-batch.

        Raises what the model does that cannot read them so; the ranks go on.
        """
        found: list[list[float]] | Exception = self._ask("logprobs_together", *self._show(samples), padding_free)
        if isinstance(found, Exception):
            raise found
        return found

    def pad(self) -> None:
        """Pad micro-batches to their longest sample from now on."""
        self._ask("pad")

    def forward_backward(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Add the gradient of the samples, normalised over all of them; return the loss's metrics."""
        metrics: dict[str, float] = self._ask("forward_backward", *self._show(samples), objective.kl_coef)
        return metrics

    def forward_backward_on_policy(
        self, samples: Sequence[Sample], objective: Objective
    ) -> tuple[list[Sample], dict[str, float]]:
        """Do what `annotate` and `forward_backward` do, in one forward pass."""
        rows, changes = self._show(samples)
        found, metrics = self._ask("forward_backward_on_policy", rows, changes, objective.kl_coef)
        return self._attach(rows, samples, found), metrics

    def optim_step(self) -> dict[str, float]:
        """Clip, update, forget the gradient; return grad_norm and lr."""
        metrics: dict[str, float] = self._ask("optim_step")
        return metrics

    def ablate(self, rows: Mapping[str, Sequence[int] | None]) -> None:
        """Set rows of the weights (None: all of a tensor) to zero until `restore`."""
        self._ask("ablate", dict(rows))

    def restore(self) -> None:
        """Give the weights that `ablate` has set to zero their values back; without any, do nothing."""
        self._ask("restore")

    def rest(self) -> None:
        """Let all that is offloaded leave the devices, until the verb that needs it."""
        self._ask("rest")

    def describe(self) -> Facts:
        """Return what is asked about model and devices; memory is that of the rank that took most."""
        facts: list[Facts] = self._ranks.ask_all("describe")
        return replace(
            facts[0],
            devices=len(facts),
            peak_allocated=max((one.peak_allocated for one in facts if one.peak_allocated is not None), default=None),
            peak_reserved=max((one.peak_reserved for one in facts if one.peak_reserved is not None), default=None),
        )

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
