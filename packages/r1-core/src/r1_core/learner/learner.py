"""The policy learner: log-probs, gradients and weights."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from r1_core import kl
from r1_core.learner import checkpoint
from r1_core.learner.batching import MicroLimit, count
from r1_core.learner.checkpoint import Adaptation
from r1_core.learner.experts import measure_load
from r1_core.learner.logprobs import compute_eager_logprobs
from r1_core.learner.microbatch import MicroBatch
from r1_core.learner.own_teacher import OwnTeacher
from r1_core.learner.parallel import full_tensor, named_state, place_like, reshard
from r1_core.learner.passes import invalidate_if_not_finite
from r1_core.learner.profiling import PassProfile
from r1_core.learner.token_model import Comparison, ModelComparison, TokenModel, TokenStats, TopComparison
from r1_core.learner.trainable import TrainableModel, TrainingOptions, prepare_update
from r1_core.needs import OF_POLICY, OF_REFERENCE, OF_TEACHER, Needs
from r1_core.objective import Objective
from r1_core.types import LOSS_FIELDS, TOP_FIELDS, LossOutput, Sample, TokenTable, Totals, with_tokens

logger = logging.getLogger(__name__)


@torch.no_grad()
def zero_weights(model: nn.Module, rows: Mapping[str, Sequence[int] | None]) -> dict[str, Tensor]:
    """Set rows of the model's tensors to zero (None: all); return copies of these tensors. All ranks must call it.

    Raises:
        KeyError: the model has no tensor of that name; nothing is changed then.
    """
    own = dict(named_state(model))
    kept = {name: own[name].detach().clone() for name in rows}
    for name, which in rows.items():
        full = full_tensor(own[name]).clone()
        full[slice(None) if which is None else torch.as_tensor(which, dtype=torch.int64)] = 0
        own[name].copy_(place_like(full, own[name]))
    return kept


@torch.no_grad()
def restore_weights(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    own = dict(named_state(model))
    for name, tensor in kept.items():
        own[name].copy_(tensor)


class Learner(TrainableModel):
    """The policy: a language model trained with a policy loss. See `TrainableModel` for all other arguments.

    If its head cannot be used alone (see `token_model`), packed rows come with `logits_to_keep=`, an index of
    positions. A model with a true attribute `reads_pack` receives a `pack.Pack` as `pack=`. A mixture of experts with
    `routing` (`experts.Routing`) computes with the `routed_experts` of samples; reference and teacher do not.

    Args:
        reference: the frozen reference; `model` itself means the model without its adapter.
        teacher: a frozen model to distil from, likewise; or the policy itself, which `compute_logprobs` only reads.
        teacher_top: how many of its most likely tokens `teacher_top` lists.
        temperature: at which the answers were sampled.
    """

    old_names: ClassVar[Mapping[str, str]] = {
        **TrainableModel.old_names,
        "ablate": "zero_weights",
        "annotate": "add_logprobs",
        "logprobs_together": "compute_logprobs_together",
        "measure": "compute_logprobs",
        "measure_on_policy": "compute_logprobs_and_gradient",
        "own_logprobs": "compute_eager_logprobs",
        "restore": "restore_weights",
    }

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        learning_rate: Callable[[int], float],
        *,
        reference: nn.Module | None = None,
        teacher: nn.Module | OwnTeacher | None = None,
        teacher_top: int = 0,
        temperature: float = 1.0,
        adaptation: Adaptation | None = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        self._own_teacher = own = teacher if isinstance(teacher, OwnTeacher) else None
        others = (reference, None if isinstance(teacher, OwnTeacher) else teacher)
        frozen = [one for one in others if one is not None and one is not model]
        super().__init__(model, optimizer, learning_rate, frozen=frozen, adaptation=adaptation, **options)
        self.reference = reference
        self.temperature, self.teacher_top = temperature, teacher_top
        self._zeroed: dict[str, Tensor] | None = None  # copies of what `zero_weights` zeroed
        self._policy_tokens = TokenModel(model, replays=True)
        self._reference_tokens, self._teacher_tokens = (
            None if one is None else TokenModel(one, adaptation.off if adaptation and one is model else nullcontext)
            for one in others
        )
        if own is not None:
            self._teacher_tokens = TokenModel(model)

    # --- log-probs -------------------------------------------------------------------------------------------------

    def add_logprobs(self, samples: Sequence[Sample], needs: Needs = ("old_logprobs", "ref_logprobs")) -> list[Sample]:
        """Add to samples the fields of `needs` that a forward pass computes, each float32 [L].

        The policy gives `old_logprobs` and `entropies`, and if needed `squared_probs` and `full_kl`; the reference
        gives `ref_logprobs`, the teacher `teacher_logprobs`, and if `teacher_top` is needed, that and its ids.
        Without a reference or a teacher, its fields are left out.

        Old log-probs equal those of `forward_backward` bit for bit with equal weights and micro-batches, unless only
        one of the calls needs the full KL.
        """
        return with_tokens(samples, **self.compute_logprobs(samples, needs))

    def compute_logprobs(self, samples: Sequence[Sample], needs: Needs) -> dict[str, Tensor]:
        """Return the fields that `add_logprobs` adds, flat for the T trained tokens: [T], `TOP_FIELDS` [T, k]."""
        found: dict[str, Tensor] = {}
        if OF_POLICY & set(needs):
            fields = {"old_logprobs": "logprobs", "entropies": "entropy"}
            fields |= {need: need for need in ("squared_probs", "full_kl") if need in needs}
            if self._reference_tokens is None:
                fields.pop("full_kl", None)
            found |= self._compute(self._policy_tokens, samples, fields)
        if OF_REFERENCE & set(needs) and self._reference_tokens is not None:
            found |= self._compute(self._reference_tokens, samples, {"ref_logprobs": "logprobs"})
        if "teacher_top" in needs and self._teacher_tokens is not None:
            found |= self._compute_top(self._teacher_tokens, samples)
        elif OF_TEACHER & set(needs) and self._teacher_tokens is not None:
            found |= self._compute(self._teacher_tokens, samples, {"teacher_logprobs": "logprobs"})
        return found

    def _compute_top(self, token_model: TokenModel, samples: Sequence[Sample]) -> dict[str, Tensor]:
        def stats_of(batch: MicroBatch) -> Tensor:
            return token_model.top(batch, self.teacher_top, self.temperature)

        columns = self._run(token_model, samples, [str(i) for i in range(1 + 2 * self.teacher_top)], stats_of)
        own, *rest = columns.values()
        top, ids = rest[: self.teacher_top], rest[self.teacher_top :]
        return {
            "teacher_logprobs": own,
            "teacher_top": torch.stack(top, dim=-1),
            "teacher_top_ids": torch.stack(ids, dim=-1).int(),
        }

    def _compute(
        self, token_model: TokenModel, samples: Sequence[Sample], fields: Mapping[str, str]
    ) -> dict[str, Tensor]:
        def stats_of(batch: MicroBatch) -> Tensor:
            other = self._comparison(self._reference_tokens, batch) if "full_kl" in fields else None
            stats = token_model(batch, self.temperature, squared_probs="squared_probs" in fields, other=other)
            return torch.stack([stats._asdict()[name] for name in fields.values()], dim=-1)

        return self._run(token_model, samples, tuple(fields), stats_of)

    def _run(
        self,
        token_model: TokenModel,
        samples: Sequence[Sample],
        names: Sequence[str],
        stats_of: Callable[[MicroBatch], Tensor],
    ) -> dict[str, Tensor]:
        self._offloads.load(token_model.model)
        token_model.model.eval()
        own = self._own_teacher if token_model is self._teacher_tokens else None
        with nullcontext() if own is None else own.swapped():
            found = self._passes.compute(samples, names, stats_of)
            reshard(token_model.model)
        self._offloads.offload(*self._frozen)
        return found

    def compute_logprobs_together(self, samples: Sequence[Sample], *, padding_free: bool) -> list[list[float]]:
        """Return the policy's log-probs of trained tokens, all samples in one micro-batch; see `_compute_together`."""
        return self._compute_together(
            samples, lambda batch: self._policy_tokens(batch, self.temperature).logprobs, padding_free=padding_free
        )

    def compute_eager_logprobs(self, samples: Sequence[Sample], noise: torch.dtype | None = None) -> list[list[float]]:
        """See `logprobs.compute_eager_logprobs`."""
        self._offloads.load(self.model)
        self.model.eval()
        found = compute_eager_logprobs(self.model, samples, self.temperature, noise)
        reshard(self.model)
        return found

    # --- one optimizer step ----------------------------------------------------------------------------------------

    def forward_backward(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Accumulate the gradient of `objective` over `samples`; return its metrics.

        Pass all samples of an optimizer step: losses are divided by their global counts. Raises ValueError if a sample
        lacks advantages or old log-probs.
        """
        if any(sample.old_logprobs is None for sample in samples):
            raise ValueError("a sample has no old_logprobs; call add_logprobs first")
        return self._forward_backward(samples, objective, None)

    def forward_backward_on_policy(
        self, samples: Sequence[Sample], objective: Objective
    ) -> tuple[list[Sample], dict[str, float]]:
        """Run `add_logprobs` and `forward_backward` in one forward pass, before any optimizer step.

        Returns the samples with `old_logprobs` and `entropies`, and the metrics. Raises ValueError if a sample lacks
        advantages, or if the objective needs old log-probs in advance.
        """
        found, metrics = self.compute_logprobs_and_gradient(samples, objective)
        return with_tokens(samples, **found), metrics

    def compute_logprobs_and_gradient(
        self, samples: Sequence[Sample], objective: Objective
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """`forward_backward_on_policy` with the fields flat, as in `compute_logprobs`."""
        table = TokenTable(samples, ("old_logprobs", "entropies"), self.device)
        metrics = self._forward_backward(samples, objective, table)
        return table.columns(self.parallel.sum_data), metrics

    def _forward_backward(
        self, samples: Sequence[Sample], objective: Objective, table: TokenTable | None
    ) -> dict[str, float]:
        """Accumulate the gradient. `table` receives the log-probs of this pass, which then serve as old log-probs."""
        if not samples:
            raise ValueError("forward_backward was given no samples")
        if any(sample.advantages is None for sample in samples):
            raise ValueError("a sample has no advantages; call advantages.assign first")
        if not self._policy_tokens.seen:
            # How the head is computed must not depend on where a run was started or resumed.
            self.compute_logprobs(samples[:1], ["old_logprobs"])
        samples, prepared = objective.prepare(samples)
        reads = {"old_logprobs", "weights", *objective.needs} & {*LOSS_FIELDS} - {"advantages"}
        samples = invalidate_if_not_finite(samples, sorted(reads), "advantages", self.step)
        self._offloads.load(self.model)
        prepare_update(self.model)
        totals = count(samples)

        def evaluate(indices: list[int], batch: MicroBatch) -> LossOutput:
            stats = self._token_stats(batch, objective, totals)
            if table is not None:
                table.put(indices, torch.stack([stats.logprobs.detach(), stats.entropy.detach()], dim=-1))
            measured = "full_kl" if objective.divergence is None else "teacher_divergence"
            return objective(batch.loss_inputs(stats.logprobs, stats.entropy, totals, **{measured: stats.full_kl}))

        fields = (*LOSS_FIELDS, *TOP_FIELDS) if objective.divergence == kl.TOP else LOSS_FIELDS
        forget = self._policy_tokens.take_expert_counts
        metrics = self._passes.add_gradients(self.model, samples, evaluate, fields, restarted=forget)
        self._offloads.offload(*self._frozen)
        counts = self._policy_tokens.take_expert_counts()
        load = {} if counts is None else measure_load(self.parallel.sum(counts))
        return metrics | prepared | load

    def _token_stats(self, batch: MicroBatch, objective: Objective, totals: Totals) -> TokenStats:
        def loss_gradient(stats: Tensor) -> Tensor:
            with torch.enable_grad():
                stats = stats.detach().requires_grad_()
                logprobs, entropy, _ = (batch.shard.spread(stats) if batch.shard else stats).unbind(-1)
                loss = objective(batch.loss_inputs(logprobs, entropy, totals)).loss
            return torch.autograd.grad(loss, stats)[0]

        return self._policy_tokens(
            batch,
            self.temperature,
            entropy_gradient=objective.entropy_gradient,
            loss_gradient=loss_gradient if objective.token_wise else None,
            other=self._other(batch, objective),
        )

    def _other(self, batch: MicroBatch, objective: Objective) -> Comparison | None:
        """Return the distributions that the objective compares with the policy's, if there are any."""
        if objective.divergence == kl.TOP:
            return TopComparison(*batch.top)
        if objective.divergence is not None:
            return self._comparison(self._teacher_tokens, batch, objective.divergence)
        return self._comparison(self._reference_tokens, batch) if objective.full_kl else None

    def _comparison(
        self, tokens: TokenModel | None, batch: MicroBatch, divergence: str = "reverse_kl"
    ) -> ModelComparison | None:
        if tokens is None:
            return None
        self._offloads.load(tokens.model)
        return ModelComparison(tokens.lazy_logits(batch), kl.DIVERGENCES.get(divergence))

    def optim_step(self) -> dict[str, float]:
        found = super().optim_step()
        if self._own_teacher is not None:
            self._own_teacher.follow(self.step)
        return found

    @property
    def _teacher_weights(self) -> Mapping[str, Tensor]:
        return {} if self._own_teacher is None else self._own_teacher.weights

    def load(self, folder: Path, *, model_only: bool = False) -> None:
        super().load(folder, model_only=model_only)
        if model_only and self._own_teacher is not None:
            self._own_teacher.restart()
        elif self._teacher_weights:
            checkpoint.load_teacher(folder, self._teacher_weights)

    def profile_pass(self, samples: Sequence[Sample], objective: Objective | None, limit: MicroLimit) -> PassProfile:
        """Run the samples in micro-batches of `limit`; return time and peak memory. No state changes.

        Without an objective the pass is forward only, through policy and reference.
        """

        def run() -> None:
            if objective is None:
                self.compute_logprobs(samples, ["old_logprobs", "ref_logprobs"])
            else:
                self.forward_backward(samples, objective)

        self._offloads.load(self.model)
        return self._profile_pass(run, limit, self._models, away=self._offloads.manages(self.optimizer))

    # --- weights and state -----------------------------------------------------------------------------------------

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and persistent buffer, frozen ones too, as (state-dict name, full tensor).

        With an adaptation, only the adapter's. Tied parameters come once. The tensors may share memory with the model.
        All ranks must exhaust the iterator. Shards are cast to `dtype` before they are gathered. Offloads the optimizer
        first.
        """
        for name, shard in self.shards(dtype):
            yield name, full_tensor(shard)

    def shards(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """`weights` without gathering: DTensors if sharded."""
        self._offloads.offload(self.optimizer)
        self._offloads.load(self.model)
        for name, tensor in self.synced_tensors():
            own = tensor.detach()
            yield name, own if dtype is None or not own.is_floating_point() else own.to(dtype)

    def synced_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that engines receive, by state-dict name: the adapter's if there is one, else all."""
        return named_state(self.model) if self.adaptation is None else self.adaptation.state(self.model)

    def zero_weights(self, rows: Mapping[str, Sequence[int] | None]) -> None:
        """Zero rows of weights (None: all) until `restore_weights`.

        Raises KeyError if there is no such tensor, RuntimeError if weights are zeroed already.
        """
        if self._zeroed is not None:
            raise RuntimeError("some weights are zeroed already; call restore_weights first")
        self._offloads.load(self.model)
        self._zeroed = zero_weights(self.model, rows)

    def restore_weights(self) -> None:
        """Undo `zero_weights`, bit for bit."""
        if self._zeroed is not None:
            self._offloads.load(self.model)
            restore_weights(self.model, self._zeroed)
        self._zeroed = None
