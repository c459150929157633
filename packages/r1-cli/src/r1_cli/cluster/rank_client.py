"""Driver-side client of the ranks, and the policy and the critic that it calls on them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from inspect import signature
from operator import eq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r1_cli.cluster.batch_transfer import diff_fields, pack_samples, view_as_tensor
from r1_cli.cluster.rank import KLCoef, NewFields, Rows
from r1_cli.cluster.snapshots import RankedSnapshot
from r1_cli.cluster.weights import RankedWeights
from r1_cli.cluster.worker_group import Reference, WorkerGroup
from r1_cli.train.types import DECLARED, Collective, Policy, Trainable, ValueModel
from r1_core.objective import Objective
from r1_core.types import PER_TOKEN, Sample, with_tokens
from r1_rollout.lora import Adapter

NO_FIELDS: dict[str, Any] = dict.fromkeys(PER_TOKEN)


class RankClient:
    """Sends a batch to the ranks once, then only changed fields; policy and critic share the batch.

    Objects are compared, not values: samples by their `token_ids`, which `dataclasses.replace` keeps, and fields.

    Args:
        inputs_dtype: of the sent floating-point model inputs; None: unchanged.
        ranks_per_node: the most ranks that share a node.
    """

    def __init__(self, ranks: WorkerGroup, inputs_dtype: torch.dtype | None = None, ranks_per_node: int = 1) -> None:
        self.ranks, self._inputs_dtype, self.ranks_per_node = ranks, inputs_dtype, ranks_per_node
        self._error: Exception | None = None  # the first that the ranks have raised
        self._batch: list[Sample] = []  # as the ranks have it
        self._rows: dict[int, int] = {}  # of the batch, by the identity of a sample's `token_ids`

    def call_model(self, model: str, method: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Call a method of the policy or the critic on all ranks, as `train.trainable` declares it.

        Of an `Objective` only `kl_coef` is sent: the ranks build the rest from the configuration.
        """
        how = DECLARED.get(method, Collective())
        arguments = signature(method).bind(self, *args, **kwargs).arguments
        arguments.pop("self")
        samples: Sequence[Sample] | None = arguments.pop("samples", None)
        batch = None if samples is None else self._send(samples)
        sent = {name: KLCoef(v.kl_coef) if isinstance(v, Objective) else v for name, v in arguments.items()}
        request = "call", model, method.__name__, batch, sent, how.catches, how.trains
        label = f"{model}.{method.__name__}"
        result = how.reduce(self.call_all(*request, label=label)) if how.reduce else self.call(*request, label=label)
        if isinstance(result, Exception):
            raise result
        return result if samples is None or batch is None else self._unpack(batch[0], samples, result)

    def call(self, verb: str, *args: object, label: str = "") -> Any:
        """Call a method of all ranks; return rank 0's result.

        After a failed call, all further calls raise its error: the ranks may be gone.
        """
        return self._first_error(self.ranks.call, verb, *args, label=label)

    def call_all(self, verb: str, *args: object, label: str = "") -> list[Any]:
        results: list[Any] = self._first_error(self.ranks.call_all, verb, *args, label=label)
        return results

    def _first_error(self, call: Callable[..., Any], verb: str, *args: object, label: str) -> Any:
        try:
            return call(verb, *args, label=label)
        except Exception as error:
            if self._error is not None:
                raise self._error from error
            self._error = error
            raise

    def _send(self, samples: Sequence[Sample]) -> tuple[Rows, Reference | None]:
        """Send samples that the ranks lack; return all rows in the batch, and the changed fields."""
        rows = self._find(samples)
        if rows is None:
            self.call("load_batch", self.ranks.put(pack_samples(samples, self.ranks.put, self._inputs_dtype)))
            self._batch = [replace(sample, **NO_FIELDS) for sample in samples]
            self._rows = {id(sample.token_ids): row for row, sample in enumerate(samples)}
            rows = list(range(len(samples)))
        changes = diff_fields(self._batch, samples, rows)
        self._keep(rows, samples)
        return pack_rows(rows), self.ranks.put(changes) if changes else None

    def _find(self, samples: Sequence[Sample]) -> list[int] | None:
        rows = [self._rows.get(id(sample.token_ids), -1) for sample in samples]
        if len(set(rows)) < len(rows) or any(
            row < 0
            or self._batch[row].loss_mask is not sample.loss_mask
            or self._batch[row].position_ids is not sample.position_ids
            or self._batch[row].model_inputs is not sample.model_inputs
            or self._batch[row].later_inputs is not sample.later_inputs
            for row, sample in zip(rows, samples, strict=True)
        ):
            return None
        return rows

    def _keep(self, rows: Iterable[int], samples: Sequence[Sample]) -> None:
        for row, sample in zip(rows, samples, strict=True):
            self._batch[row] = sample

    def _unpack(self, rows: Rows, samples: Sequence[Sample], result: object) -> object:
        if isinstance(result, tuple):
            return tuple(self._unpack(rows, samples, part) for part in result)
        if not isinstance(result, NewFields):
            return result
        found = with_tokens(samples, **{name: view_as_tensor(values) for name, values in result.values.items()})
        self._keep(rows, found)
        return found


def pack_rows(rows: Sequence[int]) -> Rows:
    """Return rows as a range if they follow one another, as those of whole groups do: each rank gets a copy."""
    run = range(rows[0], rows[0] + len(rows)) if rows else range(0)
    return run if all(map(eq, rows, run)) else np.array(rows, np.int32)


class RankedModel:
    def __init__(self, client: RankClient, model: str, protocol: type[Trainable]) -> None:
        self.client, self._model, self._protocol = client, model, protocol

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = None if name.startswith("_") else getattr(self._protocol, name, None)
        if method is None:
            raise AttributeError(f"the {self.__dict__.get('_model')} on the ranks has no method {name}")
        return partial(self.client.call_model, self._model, method)

    def snapshot(self, *, model_only: bool = False, max_bytes: int | None = None) -> RankedSnapshot | None:
        share = None if max_bytes is None else max_bytes // self.client.ranks_per_node
        copied = self.client.call_all("take_snapshot", self._model, model_only, share)
        return RankedSnapshot(self.client.ranks, self._model) if all(copied) else None


class RankedPolicy(RankedModel):
    """The policy on the ranks. The driver holds its weights only while `weights` iterates over them."""

    def __init__(self, client: RankClient, protocol: type[Trainable] = Policy) -> None:
        super().__init__(client, "policy", protocol)

    @cached_property
    def _form(self) -> Adapter | None:
        form: Adapter | None = self.client.call("adapter")
        return form

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.source(0).pairs()

    def source(self, version: int) -> RankedWeights:
        return RankedWeights(self.client.call, self.client.ranks.remote_put, version, self._form)


class RankedCritic(RankedModel):
    def __init__(self, client: RankClient, protocol: type[Trainable] = ValueModel) -> None:
        super().__init__(client, "critic", protocol)
