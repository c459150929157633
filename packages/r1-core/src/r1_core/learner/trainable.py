"""The base class of `Learner` and `Critic`: optimizer steps, micro-batch limits, offload and checkpoints."""

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from r1_core.learner import checkpoint
from r1_core.learner.batching import Batching, Layout, MicroLimit
from r1_core.learner.checkpoint import Adaptation
from r1_core.learner.logprobs import count_features
from r1_core.learner.microbatch import MicroBatch, collate
from r1_core.learner.offload import Offload, OffloadManager
from r1_core.learner.optim import clip_and_step, group_norms
from r1_core.learner.parallel import Parallel, reshard
from r1_core.learner.passes import Passes
from r1_core.learner.profiling import PassProfile, profile_pass
from r1_core.learner.tensor_files import FILE_BYTES
from r1_core.types import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LearnerInfo:
    """Model and device information that a remote driver needs.

    Example: `LearnerInfo(parameters=494_032_768, flops_per_token=2.96e9, device="NVIDIA H200", peak_allocated=2 *
    10**10, peak_reserved=3 * 10**10)`.
    """

    parameters: int
    flops_per_token: float  # of a training token, forward and backward
    device: str  # the GPU's name, or "cpu"
    peak_allocated: int | None  # peak bytes of tensors on the device; None on CPUs
    peak_reserved: int | None  # peak bytes that torch reserved
    devices: int = 1  # that train together
    tokens: tuple[int, ...] = ()  # in a step's updates, per data rank
    share_prompts: bool = False
    micro_batch: int = 1  # full sequences that fit into a training micro-batch
    straggler: float = 1.0  # largest over mean tokens of a device, per round of a step's updates


def describe(model: nn.Module, device: torch.device) -> LearnerInfo:
    """Return what is known of a model and its device.

    FLOPs of a token are 6 per weight (arXiv 2001.08361), 4 if it is frozen. That is a lower bound: embedding lookups
    and the products inside attention are not counted.
    """
    looked_up = set[nn.Parameter]()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            looked_up.update(module.parameters())
    parameters, flops = 0, 0
    for weight in model.parameters():
        parameters += weight.numel()
        flops += 0 if weight in looked_up else weight.numel() * (6 if weight.requires_grad else 4)
    on_gpu = device.type == "cuda"
    return LearnerInfo(
        parameters=parameters,
        flops_per_token=float(flops),
        device=torch.cuda.get_device_name(device) if on_gpu else device.type,
        peak_allocated=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        peak_reserved=torch.cuda.max_memory_reserved(device) if on_gpu else None,
    )


class TrainingOptions(TypedDict, total=False):
    """Arguments that `Learner` and `Critic` pass on to `TrainableModel`."""

    batching: Batching | None
    max_grad_norm: float
    parallel: Parallel | None
    fillers: Sequence[Sample]  # tiny samples, one per kind of media; see `batching.fillers`
    device: torch.device | None  # by default that of the model's first parameter
    offload: Offload | None  # the states to move to host memory while they are not needed


def prepare_update(model: nn.Module) -> None:
    """Let an update compute what the other passes compute: without dropout, or experts that a router draws.

    Only modules that recompute their activations are told that they train, without which they would keep them.
    """
    model.eval()
    for module in model.modules():
        if module.__dict__.get("gradient_checkpointing"):
            module.training = True


class TrainableModel:
    """A model, its optimizer, and the state that training needs. `Learner` and `Critic` add their passes.

    Every rank must call each method with the same arguments, after `parallel.shard_model`.

    Args:
        model: called as `model(input_ids=, position_ids=, use_cache=False, **model_inputs)`, padded with
            `attention_mask=`; returns an object with `.logits`, as in Hugging Face.
        learning_rate: the factor on the optimizer's base learning rate at optimizer step 0, 1, 2, …
        frozen: separate models that are never trained, such as the reference.
        adaptation: the adapter, if only an adapter is trained, synced and saved.

    All others are in `TrainingOptions`.
    """

    name = "policy"
    old_names: ClassVar[Mapping[str, str]] = {  # of public methods, kept for one version
        "cut": "set_micro_batch_limits",
        "rehearse": "profile_pass",
        "rest": "offload",
    }

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        learning_rate: Callable[[int], float],
        *,
        frozen: Sequence[nn.Module] = (),
        batching: Batching | None = None,
        max_grad_norm: float = 1.0,
        parallel: Parallel | None = None,
        fillers: Sequence[Sample] = (),
        device: torch.device | None = None,
        offload: Offload | None = None,
        adaptation: Adaptation | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.batching = batching or Batching()
        self.max_grad_norm = max_grad_norm
        self.parallel = parallel or Parallel()
        self.fillers = fillers
        self.adaptation = adaptation
        self.step = 0  # calls of optim_step, skipped ones too
        self.skipped_steps = 0
        self.device = device or next(model.parameters()).device
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._frozen = [one.requires_grad_(False).eval() for one in frozen]
        self._models = [model, *self._frozen]
        self._offloads = OffloadManager(offload or Offload(), model, self._frozen, optimizer)

    if not TYPE_CHECKING:  # type checkers know the new names only

        def __getattr__(self, name):
            if (new := self.old_names.get(name)) is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            message = f"{type(self).__name__}.{name} is now called {new}; the next version removes the old name"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(self, new)

    @property
    def _passes(self) -> Passes:
        return Passes(self.batching, self.parallel, self.fillers, self.device, self._models)

    def set_layout(self, layout: Layout, *, own_attention: bool = False) -> None:
        """Set how samples are laid out in micro-batches.

        Args:
            layout: `packed`: one row, no shared prompts; `padded`: one row per sample; `single`: one sample.
            own_attention: use Hugging Face's `eager` attention, which cannot read packed rows.

        Raises:
            ValueError: ranks share sequences, which needs `packed`, or `own_attention` with `packed`.
        """
        if layout != "packed" and self.parallel.sequence is not None:
            raise ValueError(f"{layout} micro-batches are not possible where ranks share sequences: use packed ones")
        if own_attention:
            if layout == "packed":
                raise ValueError("a model's own attention reads no packed rows")
            for model in self._models:
                model.set_attn_implementation("eager")  # type: ignore[operator]
        packed, single = layout == "packed", layout == "single"
        self.batching = replace(self.batching, padding_free=packed, share_prompts=False, single=single)

    def set_micro_batch_limits(self, train: MicroLimit, inference: MicroLimit) -> None:
        """Set how many tokens or samples fit in a micro-batch."""
        self.batching = replace(self.batching, update=train, experience=inference)

    def _profile_pass(
        self, run: Callable[[], object], limit: MicroLimit, models: Sequence[nn.Module], *, away: bool
    ) -> PassProfile:
        before = self.batching
        self.batching = replace(before, update=limit, experience=limit, splits=False)
        try:
            return profile_pass(run, models, self.optimizer, self.device, away=away)
        finally:
            self.batching = before

    def optim_step(self) -> dict[str, float]:
        """Clip the gradient norm, step, and clear the gradients; return `grad_norm`, `lr` and `skipped_steps`.

        Named parameter groups add `grad_norm/NAME`, before clipping. If the gradient is not finite, parameters and
        optimizer stay unchanged, and `skipped_steps` counts it. Raises RuntimeError without a gradient.
        """
        norms = group_norms(self.optimizer)  # before clipping
        scale = self.learning_rate(self.step)
        self._offloads.load(self.optimizer)
        grad_norm = clip_and_step(self.optimizer, [base * scale for base in self._base_lrs], self.max_grad_norm)
        if not math.isfinite(grad_norm):
            if self.skipped_steps == 0 and self.parallel.rank == 0:
                logger.warning(
                    "optimizer step %d of the %s skipped: the gradient's norm is %s. Later skips are only counted "
                    "(skipped_steps).", self.step, self.name, grad_norm,
                )  # fmt: skip
            self.skipped_steps += 1
        self.step += 1
        return {
            "grad_norm": grad_norm,
            "lr": self.optimizer.param_groups[0]["lr"],
            "skipped_steps": float(self.skipped_steps),
        } | norms

    def describe(self) -> LearnerInfo:
        info, batching = describe(self.model, self.device), self.batching
        return replace(info, share_prompts=batching.share_prompts, micro_batch=batching.cap(batching.update).samples)

    @torch.no_grad()
    def _compute_together(
        self, samples: Sequence[Sample], compute: Callable[[MicroBatch], Tensor], *, padding_free: bool
    ) -> list[list[float]]:
        """Return what `compute` gives for the trained tokens of each sample, all samples in one micro-batch.

        Packed, samples share prompts even if `batching` says otherwise. Every rank computes all samples.
        """
        self._offloads.load(self.model)
        self.model.eval()
        sequence = self.parallel.sequence if padding_free else None
        batch = collate(samples, padding_free=padding_free, share_prompts=True, device=self.device, sequence=sequence)
        found = compute(batch)
        reshard(self.model)
        return [own.tolist() for own in found.float().cpu().split([sample.response_length for sample in samples])]

    def count_features(self, samples: Sequence[Sample]) -> list[int | None]:
        """See `logprobs.count_features`."""
        self._offloads.load(self.model)
        self.model.eval()
        found = [count_features(self.model, sample) for sample in samples]
        reshard(self.model)
        return found

    def offload(self) -> None:
        """Offload what is configured to host memory. The next call that needs it loads it back."""
        self._offloads.offload(self.model, *self._frozen, self.optimizer)

    def save(self, folder: Path, *, model_only: bool = False, file_bytes: int = FILE_BYTES) -> None:
        """Write weights, optimizer and `learner.json` into `folder`, without pickle; see `checkpoint.save`.

        `model_only` leaves the optimizer out. Raises OSError on all ranks if one could not write.
        """
        checkpoint.save(folder, *self._state(model_only), file_bytes, self.adaptation, self._teacher_weights)

    def snapshot(
        self, *, model_only: bool = False, max_bytes: int | None = None, file_bytes: int = FILE_BYTES
    ) -> checkpoint.Snapshot | None:
        """Copy what `save` would write, to be written during training; None if it needs more than `max_bytes`."""
        state = self._state(model_only)
        return checkpoint.snapshot(*state, file_bytes, self.adaptation, self._teacher_weights, max_bytes)

    @property
    def _teacher_weights(self) -> Mapping[str, Tensor]:
        """Of a policy that teaches itself, saved with the optimizer."""
        return {}

    def _state(self, model_only: bool) -> tuple[nn.Module, Optimizer | None, dict[str, int], Parallel]:
        optimizer = None if model_only else self.optimizer
        self._offloads.load(self.model, optimizer)
        reshard(self.model)  # what a failed call left gathered
        return self.model, optimizer, {"step": self.step, "skipped_steps": self.skipped_steps}, self.parallel

    def load(self, folder: Path, *, model_only: bool = False) -> None:
        """Load what any number of ranks saved; training then continues bit for bit.

        `model_only` loads the weights alone. Raises FileNotFoundError or ValueError, naming file and tensor, if the
        folder does not fit this model.
        """
        self._offloads.load(self.model, None if model_only else self.optimizer)
        state = {} if model_only else checkpoint.load_numbers(folder)
        checkpoint.load_model(folder, self.model, self.adaptation)
        if not model_only:
            checkpoint.load_optimizer(folder, self.model, self.optimizer, state["optimizer"])
            self.step, self.skipped_steps = state["step"], state["skipped_steps"]
