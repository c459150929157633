"""The learner: old log-probs, gradients, optimizer steps, weights, save and load, as separate verbs."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from r1_core.learner import checkpoint
from r1_core.learner.batching import Batching, MicroLimit, count
from r1_core.learner.checkpoint import Adaptation, named_state
from r1_core.learner.logprobs import compute_eager_logprobs
from r1_core.learner.microbatch import LOSS_FIELDS, MicroBatch, collate
from r1_core.learner.offload import Offload
from r1_core.learner.parallel import Parallel, like, reshard, whole
from r1_core.learner.passes import spoil_if_not_finite
from r1_core.learner.profiling import PassProfile
from r1_core.learner.token_model import LazyLogits, TokenModel, TokenStats
from r1_core.learner.trainable import LearnerInfo, TrainableModel, describe
from r1_core.needs import OF_POLICY, OF_REFERENCE, Needs
from r1_core.rows import TokenTable, with_tokens
from r1_core.types import LossInputs, LossOutput, Sample, Totals

logger = logging.getLogger(__name__)


@torch.no_grad()
def zero_weights(model: nn.Module, rows: Mapping[str, Sequence[int] | None]) -> dict[str, Tensor]:
    """Set rows of the model's tensors to zero; return copies of these tensors, which `restore_weights` puts back.

    Sharded tensors are gathered, so all ranks must call it.

    Args:
        rows: by state-dict name, which rows; None for the whole tensor.

    Raises:
        KeyError: the model has no tensor of that name; nothing is changed then.
    """
    own = dict(named_state(model))
    kept = {name: own[name].detach().clone() for name in rows}
    for name, which in rows.items():
        full = whole(own[name]).clone()
        full[slice(None) if which is None else torch.as_tensor(which, dtype=torch.int64)] = 0
        own[name].copy_(like(full, own[name]))
    return kept


@torch.no_grad()
def restore_weights(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Give the model's tensors, to the bit, the values that `zero_weights` kept."""
    own = dict(named_state(model))
    for name, tensor in kept.items():
        own[name].copy_(tensor)


class Loss(Protocol):
    """What a gradient is taken of, and what the learner has to know of it before; `Objective` is one.

    A class that inherits from this one has the plain answers, and writes `__call__` alone.
    """

    @property
    def token_wise(self) -> bool:
        """Whether ∂loss/∂log-prob and ∂loss/∂entropy of a token depend on that token alone."""
        return False

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy is in the loss, and not only measured."""
        return False

    @property
    def full_kl(self) -> bool:
        """Whether the KL from the reference over the whole vocabulary is in the loss."""
        return False

    def prepare(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """Do what needs all samples of an optimizer step, before the first gradient; return metrics, too."""
        return list(samples), {}

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return a micro-batch's share of the loss and of the metrics."""


class Learner(TrainableModel):
    """A model being trained, and the verbs that a training loop composes.

    The model is called as `model(input_ids=, position_ids=, use_cache=False, **model_inputs)`, padded with
    `attention_mask=`, and returns an object with `.logits`, as Hugging Face's causal models do. One whose head cannot
    be used alone (see `token_model`) is given `logits_to_keep=` (an index of positions), too, if packed, and one with
    a true attribute `reads_pack` a `pack.Pack` as `pack=`, which spares its layers asking the device. Under
    several ranks every verb must be called by all of them with the same arguments, and `model` and `reference` must
    have gone through `parallel.shard_model` before.

    `learning_rate` gives the factor on the optimizer's base learning rate at optimizer step 0, 1, 2, …
    `temperature` is the one that the answers were sampled at. `device` is where it computes, by default where the
    first parameter lies. In which precision is a matter of the model: of its weights, or of how it is sharded
    (`parallel.Shard`). `fillers`, of use to several ranks only, are tiny samples, one of each kind of media, for those
    that have none of it while others do. `offload` says what leaves the device meanwhile. With an `adaptation` only
    the adapter is handed over and kept, and where `reference` is the model itself, it is the model without the adapter.
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
        batching: Batching | None = None,
        temperature: float = 1.0,
        max_grad_norm: float = 1.0,
        parallel: Parallel | None = None,
        fillers: Sequence[Sample] = (),
        device: torch.device | None = None,
        offload: Offload | None = None,
        adaptation: Adaptation | None = None,
    ) -> None:
        super().__init__(
            model, optimizer, learning_rate,
            reference=None if reference is model else reference, batching=batching, max_grad_norm=max_grad_norm,
            parallel=parallel, fillers=fillers, device=device, offload=offload, adaptation=adaptation,
        )  # fmt: skip
        self.reference = reference
        self.temperature = temperature
        self._kept: dict[str, Tensor] | None = None  # what `zero_weights` has set to zero
        self._policy_tokens = TokenModel(model)
        inside = adaptation.off if adaptation is not None and reference is model else nullcontext
        self._reference_tokens = None if reference is None else TokenModel(reference, inside)

    # --- log-probs -------------------------------------------------------------------------------------------------

    def add_logprobs(self, samples: Sequence[Sample], needs: Needs = ("old_logprobs", "ref_logprobs")) -> list[Sample]:
        """Return the samples, in order, with what `needs` asks for and a forward pass finds, each float32 [L].

        One pass of the policy gives `old_logprobs` and `entropies`, and what is asked for of `squared_probs` and
        `full_kl`; one of the reference `ref_logprobs`. Without one there is neither `full_kl` nor `ref_logprobs`.

        The old log-probs are, to the bit, those of `forward_backward` if the model has not moved, does the same in
        training as in evaluation, and the micro-batches are the same; where only one of the two takes the full KL,
        they are to rounding.
        """
        return with_tokens(samples, **self.compute_logprobs(samples, needs))

    def compute_logprobs(self, samples: Sequence[Sample], needs: Needs) -> dict[str, Tensor]:
        """Return what `add_logprobs` adds to the samples, by field, flat: float32 [T] for their T trained tokens."""
        found: dict[str, Tensor] = {}
        if OF_POLICY & set(needs):
            fields = {"old_logprobs": "logprobs", "entropies": "entropy"}
            fields |= {need: need for need in ("squared_probs", "full_kl") if need in needs}
            if self._reference_tokens is None:
                fields.pop("full_kl", None)
            found |= self._compute(self._policy_tokens, samples, fields)
        if OF_REFERENCE & set(needs) and self._reference_tokens is not None:
            found |= self._compute(self._reference_tokens, samples, {"ref_logprobs": "logprobs"})
        return found

    def _compute(
        self, token_model: TokenModel, samples: Sequence[Sample], fields: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Return fields of the samples, for each of which the name in `TokenStats` is given: float32 [T]."""

        def stats_of(batch: MicroBatch) -> Tensor:
            reference = self._reference_logits(batch) if "full_kl" in fields else None
            stats = token_model(batch, self.temperature, squared_probs="squared_probs" in fields, reference=reference)
            return torch.stack([getattr(stats, name) for name in fields.values()], dim=-1)

        self._residence.fetch(token_model.model)
        token_model.model.eval()
        found = self._passes.compute(samples, tuple(fields), stats_of)
        reshard(token_model.model)
        self._residence.release(self._apart)
        return found

    @torch.no_grad()
    def compute_logprobs_together(self, samples: Sequence[Sample], *, padding_free: bool) -> list[list[float]]:
        """Return the policy's log-probs of each sample's trained tokens, all samples in one micro-batch.

        Packed, they share the prompts that they tell of, whatever the batching says. Every rank computes all of it, or
        a packed row's part if ranks share sequences.
        """
        self._residence.fetch(self.model)
        self.model.eval()
        sequence = self.parallel.sequence if padding_free else None
        batch = collate(samples, padding_free=padding_free, share_prompts=True, device=self.device, sequence=sequence)
        found = self._policy_tokens(batch, self.temperature).logprobs
        reshard(self.model)
        return [own.tolist() for own in found.float().cpu().split([sample.response_length for sample in samples])]

    def compute_eager_logprobs(self, samples: Sequence[Sample], noise: torch.dtype | None = None) -> list[list[float]]:
        """Return what `compute_logprobs_together` should, by the policy's own forward; see `logprobs`."""
        self._residence.fetch(self.model)
        self.model.eval()
        found = compute_eager_logprobs(self.model, samples, self.temperature, noise)
        reshard(self.model)
        return found

    # --- one optimizer step ----------------------------------------------------------------------------------------

    def forward_backward(self, samples: Sequence[Sample], objective: Loss) -> dict[str, float]:
        """Add the gradient of `objective` over `samples` to the parameters' and return its metrics over all of them.

        The samples are all of one optimizer step's: losses are divided by their totals, so neither the cut into
        micro-batches nor the number of ranks changes the gradient. Raises ValueError on samples without advantages or
        old log-probs.
        """
        if any(sample.old_logprobs is None for sample in samples):
            raise ValueError("a sample has no old_logprobs; call add_logprobs first")
        return self._forward_backward(samples, objective, None)

    def forward_backward_on_policy(
        self, samples: Sequence[Sample], objective: Loss
    ) -> tuple[list[Sample], dict[str, float]]:
        """Do what `add_logprobs` (of the policy) and `forward_backward` do, where no optimizer step lies between them.

        The policy before the step is then the one whose gradient is taken, so one forward pass gives both. Returns the
        samples with `old_logprobs` and `entropies`, and the metrics. Gradient and metrics are those of the two, to
        the bit if micro-batches are the same and the model does the same in training as in evaluation.

        Raises ValueError on samples without advantages, and if the objective needs their old log-probs before.
        """
        found, metrics = self.compute_logprobs_and_gradient(samples, objective)
        return with_tokens(samples, **found), metrics

    def compute_logprobs_and_gradient(
        self, samples: Sequence[Sample], objective: Loss
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Do what `forward_backward_on_policy` does; return the log-probs and entropies as `compute_logprobs` does."""
        table = TokenTable(samples, ("old_logprobs", "entropies"), self.device)
        metrics = self._forward_backward(samples, objective, table)
        return table.columns(self.parallel.sum_data), metrics

    def _forward_backward(
        self, samples: Sequence[Sample], objective: Loss, table: TokenTable | None
    ) -> dict[str, float]:
        """Add the gradient; `table` takes the log-probs that it was taken at, which are the old ones if not given."""
        if not samples:
            raise ValueError("forward_backward was given no samples")
        if any(sample.advantages is None for sample in samples):
            raise ValueError("a sample has no advantages; call advantages.assign first")
        if not self._policy_tokens.seen:
            # How the head is computed must not depend on where a run was begun, or a checkpoint loaded.
            self.compute_logprobs(samples[:1], ["old_logprobs"])
        samples, prepared = objective.prepare(samples)
        reads = {"old_logprobs", "weights", *getattr(objective, "needs", LOSS_FIELDS)} & {*LOSS_FIELDS} - {"advantages"}
        samples = spoil_if_not_finite(samples, sorted(reads), "advantages", self.step)
        self._residence.fetch(self.model)
        self.model.train()
        totals = count(samples)

        def evaluate(indices: list[int], batch: MicroBatch) -> LossOutput:
            stats = self._token_stats(batch, objective, totals)
            if table is not None:
                table.put(indices, torch.stack([stats.logprobs.detach(), stats.entropy.detach()], dim=-1))
            return objective(batch.loss_inputs(stats.logprobs, stats.entropy, totals, full_kl=stats.full_kl))

        metrics = self._passes.add_gradients(self.model, samples, evaluate)
        self._residence.release(self._apart)
        return metrics | prepared

    def _token_stats(self, batch: MicroBatch, objective: Loss, totals: Totals) -> TokenStats:
        """Statistics with gradients: the entropy's and the full KL's if the objective has them in the loss."""

        def loss_gradient(stats: Tensor) -> Tensor:
            with torch.enable_grad():
                stats = stats.detach().requires_grad_()
                logprobs, entropy, _ = (batch.share.spread(stats) if batch.share else stats).unbind(-1)
                loss = objective(batch.loss_inputs(logprobs, entropy, totals)).loss
            return torch.autograd.grad(loss, stats)[0]

        return self._policy_tokens(
            batch,
            self.temperature,
            entropy_gradient=objective.entropy_gradient,
            loss_gradient=loss_gradient if objective.token_wise else None,
            reference=self._reference_logits(batch) if objective.full_kl else None,
        )

    def _reference_logits(self, batch: MicroBatch) -> LazyLogits | None:
        self._residence.fetch(self._apart)
        return None if self._reference_tokens is None else self._reference_tokens.lazy_logits(batch)

    def profile_pass(self, samples: Sequence[Sample], objective: Loss | None, limit: MicroLimit) -> PassProfile:
        """Compute the samples in micro-batches of `limit`, forward and backward, and forget it; return what it took.

        Without an objective it is forward only, through policy and reference, as `add_logprobs` does. All is as it was
        then: see `profiling.profile_pass`, which raises what is wrong.
        """

        def run() -> None:
            if objective is None:
                self.compute_logprobs(samples, ["old_logprobs", "ref_logprobs"])
            else:
                self.forward_backward(samples, objective)

        self._residence.fetch(self.model)
        return self._profile_pass(run, limit, self._models, away=self._residence.moves(self.optimizer))

    # --- weights and state -----------------------------------------------------------------------------------------

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and persistent buffer, frozen ones too, as (state-dict name, full tensor).

        With an adaptation these are the adapter's alone. Tied parameters come once, under their first name. The tensors
        may share memory with the model's: copy what you keep. Under several ranks all must exhaust the iterator;
        floating-point shards are cast to `dtype` before they are gathered. They are asked for before others sample, so
        the optimizer's states leave if they are to.
        """
        for name, shard in self.shards(dtype):
            yield name, whole(shard)

    def shards(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield what `weights` does as this rank has it, which is a DTensor where ranks have parts."""
        self._residence.release(self.optimizer)
        self._residence.fetch(self.model)
        for name, tensor in checkpoint.handed_over(self.model, self.adaptation):
            own = tensor.detach()
            yield name, own if dtype is None or not own.is_floating_point() else own.to(dtype)

    def zero_weights(self, rows: Mapping[str, Sequence[int] | None]) -> None:
        """Set rows of the weights (None: all of a tensor) to zero until `restore_weights`; see `ablation.zero_weights`.

        Raises KeyError if there is no such tensor, and RuntimeError if some are zero already.
        """
        if self._kept is not None:
            raise RuntimeError("some weights are set to zero already; call restore_weights first")
        self._residence.fetch(self.model)
        self._kept = zero_weights(self.model, rows)

    def restore_weights(self) -> None:
        """Give the weights that `zero_weights` has zeroed their values back, to the bit. Without any, do nothing."""
        if self._kept is not None:
            self._residence.fetch(self.model)
            restore_weights(self.model, self._kept)
        self._kept = None

    def describe(self) -> LearnerInfo:
        """Return what a driver asks about model and device."""
        info, batching = describe(self.model, self.device), self.batching
        return replace(info, share_prompts=batching.share_prompts, micro_batch=batching.cap(batching.update).samples)
