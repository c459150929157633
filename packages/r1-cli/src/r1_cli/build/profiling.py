"""Choose micro-batch sizes; on a GPU, profile the longest micro-batches that the settings allow."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Literal

import torch

from r1_cli.build.algorithm import build_objective
from r1_cli.build.learner import build_batching, owner_settings
from r1_cli.build.longest_sample import LongestSample, find_longest
from r1_cli.build.micro_batch_sizes import SizeChoice, count_sequences, find_largest_size
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.actor import UpdateConfig
from r1_cli.config.root import Owner
from r1_cli.config.section import AUTO_SIZE, lookup
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_cli.train.types import Policy, Trainable, ValueModel
from r1_core.kl import TOP
from r1_core.learner.batching import MicroLimit
from r1_core.learner.profiling import PassProfile, is_out_of_memory
from r1_core.types import Sample
from r1_data.render import Renderer

log = logging.getLogger("r1")

Pass = Literal["update", "experience"]
OF_MODELS = (RuntimeError, ValueError, TypeError, IndexError)  # raised by a model that cannot read its inputs
SHORT = 256  # tokens that every model reads
PASSES: tuple[Pass, ...] = ("update", "experience")
LABELS = {"update": "updates", "experience": "log-probs"}
# Computes samples in micro-batches of a limit, with a gradient or without, and forgets it.
ProfilePass = Callable[[list[Sample], MicroLimit, bool], PassProfile]


def choose_micro_batches(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    renderer: Renderer,
    learner: Policy,
    critic: ValueModel | None,
    kept: Mapping[str, int],
    *,
    pictures: bool,
) -> tuple[RunConfig, dict[str, int]]:
    """Choose micro-batch sizes that are `auto`, and set the limits of learner and critic.

    Profiling changes no state: the run equals one with these sizes set, bit for bit. On a GPU, given sizes are
    profiled, too, to find now if one does not fit.

    Args:
        kept: sizes by key that the run chose before its checkpoint.
        pictures: whether the rows have pictures.

    Returns:
        The configuration with numbers in place of `auto`, and the chosen sizes by key.

    Raises:
        ConfigError: the given size, or a single sequence, does not fit; names the key to lower.
    """
    chosen: dict[str, int] = {}
    longest: LongestSample | None = None
    for owner, trained, profile_pass in list_models(config, learner, critic):
        if not hardware.on_gpu and not any(is_auto(config, owner, kind) for kind in PASSES):
            continue
        longest = longest or find_longest(config, model, renderer, pictures=pictures and hardware.on_gpu)
        if critic is not None:
            (learner if owner == "critic" else critic).offload()
        info = learner.describe()  # a critic is of the same family and size
        share = info.share_prompts and owner_settings(config, owner).share_prompts
        chooser = SizeChooser(config, owner, hardware.on_gpu, share, longest, info.parameters, profile_pass)
        sizes = chooser.choose(kept)
        chosen |= {key_of(owner, kind): size for kind, size in sizes.items() if is_auto(config, owner, kind)}
        config = with_sizes(config, owner, sizes)
        batching = build_batching(config, owner_settings(config, owner))
        trained.set_micro_batch_limits(batching.update, batching.experience)
    if critic is not None:
        critic.offload()
    return config, chosen


def list_models(
    config: RunConfig, learner: Policy, critic: ValueModel | None
) -> Iterator[tuple[Owner, Trainable, ProfilePass]]:
    objective, topk = build_objective(config), config.algorithm.distillation.topk or 0

    def profile_policy(samples: list[Sample], limit: MicroLimit, grad: bool) -> PassProfile:
        if objective.divergence == TOP:
            from r1_cli.train.teaching import with_top

            samples = [with_top(one, None, topk) for one in samples]
        return learner.profile_pass(samples, objective if grad else None, limit)

    yield "actor", learner, profile_policy
    if critic is not None:
        yield "critic", critic, lambda samples, limit, grad: critic.profile_pass(samples, limit, gradient=grad)


@dataclass(frozen=True, slots=True)
class SizeChooser:
    config: RunConfig
    owner: Owner
    on_gpu: bool
    share: bool  # a prompt is computed once for its answers in a micro-batch
    longest: LongestSample
    parameters: int
    profile_pass: ProfilePass

    @property
    def section(self) -> UpdateConfig:
        return owner_settings(self.config, self.owner)

    def choose(self, kept: Mapping[str, int]) -> dict[Pass, int]:
        begun, choices = perf_counter(), dict[Pass, SizeChoice]()
        for kind in PASSES:
            key = key_of(self.owner, kind)
            if not is_auto(self.config, self.owner, kind) or key in kept:
                size = kept.get(key, self.section.update_size if kind == "update" else self.section.experience_size)
                choices[kind] = SizeChoice(size, self.attempt(kind, size) if self.on_gpu else None)
            elif self.on_gpu:
                least = choices["update"].size if kind == "experience" else 1  # which is known to fit
                choices[kind] = self.dividing(
                    find_largest_size(self.max_sequences(kind), partial(self.attempt, kind), least)
                )
            else:
                size = count_sequences(self.longest.tokens, self.max_sequences(kind), self.parameters)
                choices[kind] = self.dividing(SizeChoice(size, None))
        self.log_sizes(choices, perf_counter() - begun)
        return {kind: choice.size for kind, choice in choices.items()}

    def max_sequences(self, kind: Pass) -> int:
        """Return how many sequences of a step, or an optimizer step, each device has."""
        prompts = self.section.global_batch_size if kind == "update" else self.config.data.rollout_batch_size
        return max(1, prompts * self.config.worker.rollout.n // self.config.data_ranks(self.owner))

    def dividing(self, choice: SizeChoice) -> SizeChoice:
        """Return the choice, without dynamic batching the next smaller size that divides an optimizer step."""
        if self.section.dynamic_batching:
            return choice
        whole = self.max_sequences("update")
        return SizeChoice(max(size for size in range(1, choice.size + 1) if whole % size == 0), choice.profile)

    def attempt(self, kind: Pass, size: int) -> PassProfile:
        """Profile two micro-batches on each rank, as the second adds to the first's gradients. For GPUs."""
        length = self.longest.tokens
        limit = MicroLimit(size, size * length if self.section.dynamic_batching else None)
        samples = self.longest.samples(limit, 2 * self.config.data_ranks(self.owner), share=self.share, length=length)
        return self.profile(kind, size, length, samples, limit)

    def profile(self, kind: Pass, size: int, length: int, samples: list[Sample], limit: MicroLimit) -> PassProfile:
        """Profile a pass. Raises ConfigError, or OutOfMemoryError if a smaller size may still fit."""
        try:
            return self.profile_pass(samples, limit, kind == "update")
        except Exception as error:
            full = is_out_of_memory(error)
            if not full and type(error) not in OF_MODELS:  # a user's loss or a lost rank has its own error
                raise
            # Ranks that did not run out of memory wait for the one that did, and have ended by now.
            alone, chooses = self.config.trainer.devices == 1, is_auto(self.config, self.owner, kind)
            if full and size > 1 and chooses and alone:
                raise torch.OutOfMemoryError(str(error)) from error
            raise ConfigError([self.problem(kind, size, length, error, full=full)]) from error

    def problem(self, kind: Pass, size: int, length: int, error: Exception, *, full: bool) -> Problem:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        if not full and length <= SHORT:
            key = f"worker.{self.owner}.model.model_path"
            return Problem(
                key, f"fails in a profiling pass of {length} tokens: {first_line}", self.section.model.model_path
            )
        if size > 1:
            message = f"{size} sequences of {length:,} tokens do not fit into the device's memory: set a smaller number"
            auto = "" if is_auto(self.config, self.owner, kind) else ", or auto"
            return Problem(key_of(self.owner, kind), message + auto, str(size))
        what = "does not fit into the device's memory" if full else f"cannot be computed ({first_line})"
        more = f", or set worker.{self.owner}.model.enable_gradient_checkpointing=true" if full else ""
        message = f"a sequence of {length:,} tokens, which it allows with data.max_prompt_length, {what}: lower one"
        return Problem("data.max_response_length", message + more, str(self.config.data.max_response_length))

    def log_sizes(self, choices: Mapping[Pass, SizeChoice], seconds: float) -> None:
        sizes = ", ".join(f"{choice.size} for {LABELS[kind]}" for kind, choice in choices.items())
        tokens = f"a sequence has at most {self.longest.tokens:,} tokens"
        profiles = [choice.profile for choice in choices.values() if choice.profile is not None]
        found = ""
        if profiles:
            peak, room = max(profile.peak for profile in profiles), profiles[0].available
            found = f"; profiled in {seconds:.1f} s, peak {peak / 1e9:.2f} GB"
            found += f" of {room / 1e9:.0f} GB" if room else " of this process"
        log.info("sequences in a micro-batch of the %s: %s; %s%s", self.owner, sizes, tokens, found)


def key_of(owner: Owner, kind: Pass) -> str:
    return f"worker.{owner}.micro_batch_size_per_device_for_{kind}"


def is_auto(config: RunConfig, owner: Owner, kind: Pass) -> bool:
    return bool(lookup(config, key_of(owner, kind)) == AUTO_SIZE)


def with_sizes(config: RunConfig, owner: Owner, sizes: Mapping[Pass, int]) -> RunConfig:
    names = {key_of(owner, kind).rpartition(".")[2]: size for kind, size in sizes.items()}
    section = owner_settings(config, owner).model_copy(update=names)
    return config.model_copy(update={"worker": config.worker.model_copy(update={owner: section})})
