"""What crosses between the driver and the ranks: verbs, the samples of a batch once, and what is new of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from r1_cli.cluster.batch import Array, Reference, find_changes, in_place, to_columns
from r1_cli.cluster.ranks import Ranks
from r1_cli.cluster.saving import RankedSnapshot
from r1_core.rows import with_tokens
from r1_core.types import PER_TOKEN, Sample

FORGOTTEN: dict[str, Any] = dict.fromkeys(PER_TOKEN)


class Crossing:
    """The driver's side of a batch that policy and critic share on the ranks.

    The ranks keep the samples of the last batch, and are only told what is new: samples that they have are known by
    their `token_ids`, which `dataclasses.replace` keeps, and fields as objects.

    Args:
        inputs_dtype: what floating-point model inputs cross in; None: as they are.
        neighbours: ranks that share a machine, at most.
    """

    def __init__(self, ranks: Ranks, inputs_dtype: torch.dtype | None = None, neighbours: int = 1) -> None:
        self._ranks, self._inputs_dtype, self._neighbours = ranks, inputs_dtype, neighbours
        self._error: Exception | None = None  # the first that the ranks have raised
        self._batch: list[Sample] = []  # as the ranks have it
        self._rows: dict[int, int] = {}  # of the batch, by the identity of a sample's `token_ids`

    def ask(self, verb: str, *args: Any) -> Any:
        """Ask all ranks; return what the first answers.

        What fails after an error fails for its reason, as ranks may be gone: it is raised again.
        """
        return self._told(self._ranks.ask, verb, *args)

    def ask_all(self, verb: str, *args: Any) -> list[Any]:
        """Ask all ranks, as `ask` does; return what each answers."""
        answers: list[Any] = self._told(self._ranks.ask_all, verb, *args)
        return answers

    def _told(self, ask: Callable[..., Any], verb: str, *args: Any) -> Any:
        try:
            return ask(verb, *args)
        except Exception as error:
            if self._error is not None:
                raise self._error from error
            self._error = error
            raise

    def take_snapshot(self, owner: str, model_only: bool, max_bytes: int | None) -> RankedSnapshot | None:
        """Let the ranks copy what a checkpoint holds of the "learner" or the "critic".

        None if a machine would need more than `max_bytes` of its memory; all machines are assumed to be alike.
        """
        share = None if max_bytes is None else max_bytes // self._neighbours
        copied = self._told(self._ranks.ask_all, "copy", owner, model_only, share)
        return RankedSnapshot(self._ranks, owner) if all(copied) else None

    def show(self, samples: Sequence[Sample]) -> tuple[Array, Reference | None]:
        """Let the ranks have these samples; return their rows in the batch, and what is new of them."""
        rows = self._find(samples)
        if rows is None:
            self.ask("take", self._ranks.put(to_columns(samples, self._ranks.put, self._inputs_dtype)))
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

    def attach(self, rows: Array, samples: Sequence[Sample], found: Mapping[str, Array]) -> list[Sample]:
        """Set what rank 0 has found; all ranks have it, too."""
        annotated = with_tokens(samples, **{name: in_place(values) for name, values in found.items()})
        self._keep(rows.tolist(), annotated)
        return annotated
