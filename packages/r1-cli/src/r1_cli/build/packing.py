"""Check which batch layouts compute a model's log-probs correctly, and choose one for learner and critic.

Four layouts are compared with the model's own `eager` attention on each sequence alone: a single sequence, a padded
batch, a packed row, and shared prompts in a row. Each has a fallback.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from r1_cli.build.canary import build_probes
from r1_cli.build.learner import owner_settings
from r1_cli.build.refusals import MIXES, OTHER, SEES_LATER, explain_refusal, first_line, name_failure
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.root import Owner
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_cli.models.load import ModelError, find_rope_fault
from r1_cli.train.groups.group import extend_positions
from r1_cli.train.types import REFUSALS, Policy, Trainable, ValueModel
from r1_core.types import Sample
from r1_data.render import Renderer
from r1_rollout.probes import Probes
from r1_rollout.token_kinds import find_kinds, media_kinds
from r1_rollout.types import PromptLike
from r1_rollout.weight_checks import TOLERANCE, learn_tolerance, widest_gap

log = logging.getLogger("r1")

# Tolerance for other tokens of the same number, in any precision: the same kernels round in the same way.
NEIGHBOUR = TOLERANCE[torch.float32]


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with each layout, to end a sentence; None if it is correct."""

    single: str | None  # a sequence alone, by r1's attention
    padded: str | None
    packed: str | None
    shared: str | None  # prompts in a packed row


class LayoutCheck:
    """Compares layouts with the model's own forward. Each check returns the fault: other log-probs, or a leak."""

    def __init__(self, learner: Policy, probes: Probes, fresh: Probes, dtype: torch.dtype) -> None:
        """Compute the expected log-probs.

        Args:
            probes: a short text, a long one and, if possible, a picture.
            fresh: others of the same kinds and lengths.
            dtype: the computing precision.
        """
        self._learner, self._probes = learner, probes
        self.samples = list(map(_to_sample, probes.prompts, probes.responses))
        self._other = _to_sample(fresh.prompts[1], fresh.responses[1])  # replaces the long text
        self._answers = _split_answers(fresh)
        self._expected = learner.compute_eager_logprobs(self.samples)
        # A model that names no layers shows no noise.
        noise = widest_gap(learner.compute_eager_logprobs(self.samples, dtype), self._expected)
        if not all(torch.tensor(one).isfinite().all() for one in self._expected):
            raise ValueError("its log-probs are not finite: look at the weights")
        self.tolerance = learn_tolerance(noise, dtype)

    def check_single(self) -> str | None:
        last = self.samples[1]
        changed = replace(last, token_ids=torch.cat([last.token_ids[:-1], self._other.token_ids[-1:]]))
        try:
            found = [self._compute([sample], padding_free=False)[0] for sample in self.samples]
            later = self._compute([changed], padding_free=False)[0]
        except REFUSALS as error:
            return f"cannot be computed ({first_line(error)})"
        if not (leak := widest_gap([later[:-1]], [found[1][:-1]])) <= NEIGHBOUR:
            return f"{SEES_LATER} (log-probs off by {leak:.2g} of their size)"
        return self._differs(found, OTHER)

    def check_padded(self) -> str | None:
        return self._check_together(
            padding_free=False, what="a padded batch", leaks="mixes up the rows of a padded batch"
        )

    def check_packed(self) -> str | None:
        """Linear attention, or attention that ignores positions, reads the row as one long sequence."""
        return self._check_together(padding_free=True, what="a packed row", leaks="takes a packed row for one sequence")

    def _check_together(self, *, padding_free: bool, what: str, leaks: str) -> str | None:
        first, long, *media = self.samples
        try:
            # The long one starts within the row, and the short one follows it once more.
            found = self._compute([first, long, *media, first], padding_free=padding_free)
            changed = self._compute([first, self._other, *media, first], padding_free=padding_free)
        except REFUSALS as error:
            return f"cannot read {what} ({name_failure(error)})"
        # The neighbour has the same length, so the same kernels compute the others in the same way.
        if not (leak := widest_gap([changed[0], *changed[2:]], [found[0], *found[2:]])) <= NEIGHBOUR:
            return f"{leaks} (log-probs off by {leak:.2g} of their size)"
        return self._differs(found, f"has other log-probs in {what}", [*self._expected, self._expected[0]])

    def check_shared(self) -> str | None:
        """Layers with a state, or with a window over the row, mix up the answers."""
        first, second, other = self._answers
        alone = [_to_sample(prompt, answer) for prompt in self._probes.prompts for answer in (first, second)]
        try:
            found, changed = (
                self._compute(
                    [
                        replace(_to_sample(prompt, answer), prompt_length=len(prompt.token_ids))
                        for prompt in self._probes.prompts
                        for answer in (leading, second)
                    ],
                    padding_free=True,
                )
                for leading in (first, other)
            )
        except REFUSALS as error:
            return f"cannot read a shared prompt ({name_failure(error)})"
        if not (leak := widest_gap(changed[1::2], found[1::2])) <= NEIGHBOUR:
            return f"mixes up the answers to a shared prompt (log-probs off by {leak:.2g} of their size)"
        return self._differs(
            found, "has other log-probs behind a shared prompt", self._learner.compute_eager_logprobs(alone)
        )

    def _compute(self, samples: Sequence[Sample], *, padding_free: bool) -> list[list[float]]:
        return self._learner.compute_logprobs_together(samples, padding_free=padding_free)

    def _differs(self, found: list[list[float]], what: str, expected: list[list[float]] | None = None) -> str | None:
        gap = widest_gap(found, self._expected if expected is None else expected)
        return (
            None if gap <= self.tolerance else f"{what} (off by {gap:.2g} of their size, {self.tolerance:.2g} allowed)"
        )


def find_faults(learner: Policy, probes: Probes, fresh: Probes, dtype: torch.dtype) -> Faults:
    try:
        questions = LayoutCheck(learner, probes, fresh, dtype)
    except REFUSALS as error:
        own = f"cannot be computed and differentiated ({first_line(error)})"
        return Faults(own, own, own, own)
    if (single := questions.check_single()) is not None:
        return Faults(single, single, single, single)
    padded, packed = questions.check_padded(), questions.check_packed()
    return Faults(None, padded, packed, packed or questions.check_shared())


def find_packing_fault(learner: Policy, probes: Probes, fresh: Probes, tolerance: float) -> str | None:
    return LayoutCheck(learner, probes, fresh, _dtype_of(tolerance)).check_packed()


def find_sharing_fault(learner: Policy, probes: Probes, fresh: Probes, tolerance: float) -> str | None:
    return LayoutCheck(learner, probes, fresh, _dtype_of(tolerance)).check_shared()


def _dtype_of(tolerance: float) -> torch.dtype:
    return next(dtype for dtype, widest in TOLERANCE.items() if widest == tolerance)


def choose_layout(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    renderer: Renderer,
    learner: Policy,
    critic: ValueModel | None = None,
    *,
    pictures: bool = True,
) -> None:
    """Check all layouts, and set learner and critic to the nearest correct one; log each fallback.

    Without `pictures`, rows of text are all that has to be right.

    A model that is wrong with r1's attention uses its own, padded; if padded batches are wrong, one sample at a time.
    The critic's model is of the same family and uses the learner's layout.

    Raises:
        ModelError: no layout is correct.
        ConfigError: ranks share packed rows, which are wrong.
    """
    trained: dict[Owner, Trainable] = {"actor": learner}
    if critic is not None:
        trained["critic"] = critic
    name = model.config.model_type

    def attend_by_itself(fault: str) -> None:
        _require_unshared(config, trained, f"{name} {fault}")
        log.warning("%s %s: it uses its own eager attention", name, fault)
        for one in trained.values():
            one.set_layout("padded", own_attention=True)

    faults = examine_model(config, hardware, model, renderer, learner, attend_by_itself, pictures=pictures)
    for owner, one in trained.items():
        _set_layout(config, owner, one, faults, name)


def examine_model(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    renderer: Renderer,
    learner: Policy,
    attend_by_itself: Callable[[str], None],
    *,
    pictures: bool = True,
) -> Faults:
    """Check all layouts, again after `attend_by_itself(fault)` if r1's attention is wrong. Raises ModelError."""
    actor, name = config.worker.actor, model.config.model_type
    dtype = hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)
    probes, fresh = (build_probes(config, model, renderer, variant=variant, sampled=False) for variant in (0, 1))
    if not pictures:
        probes, fresh = probes.without_media(), fresh.without_media()
    require_features(model, learner, probes)
    require_own_pictures(model, learner, probes, fresh)
    faults = find_faults(learner, probes, fresh, dtype)
    if faults.single is not None:
        attend_by_itself(faults.single)
        own = "reads no packed rows by its own attention"
        faults = replace(find_faults(learner, probes, fresh, dtype), packed=own, shared=own)
        if faults.single is not None:
            raise ModelError(f"{model.path}: {explain_refusal(name, faults.single)}")
    rope = find_rope_fault(
        model.path, model.config.get_text_config(), config.data.max_prompt_length + config.data.max_response_length
    )
    return faults if rope is None else replace(faults, padded=rope, packed=rope, shared=rope)


def require_features(model: ModelFiles, learner: Policy, probes: Probes) -> None:
    """Compare the placeholders that the processor writes for a picture with the features of the model's vision tower.

    Raises ModelError if they are not as many. A model whose forward fails is left to the other questions.
    """
    kinds = media_kinds(model.config)
    samples = _with_media(probes)
    if not (samples and kinds):
        return
    try:
        counts = learner.count_features(samples)
    except REFUSALS:
        return
    for sample, features in zip(samples, counts, strict=True):
        placeholders = int((find_kinds(sample.token_ids, kinds) == 1).sum())
        if features is not None and features != placeholders:
            raise ModelError(
                f"{model.path}: pictures of {model.config.model_type} cannot be used: for one picture its processor "
                f"writes {placeholders} placeholders and its vision tower computes {features} features; take the "
                "processor and the config.json that were published with the weights"
            )


def require_own_pictures(model: ModelFiles, learner: Policy, probes: Probes, fresh: Probes) -> None:
    """Raise ModelError if a picture changes the log-probs of another row."""
    for sample, other in zip(_with_media(probes), _with_media(fresh), strict=True):
        if find_mixing(learner, sample, other):
            raise ModelError(f"{model.path}: {MIXES.format(name=model.config.model_type)}")


def find_mixing(learner: Policy, sample: Sample, other: Sample) -> bool:
    """Whether the pictures of another row of a batch change a row's log-probs, as some vision towers mix them."""
    inverted = {name: -one if one.is_floating_point() else one for name, one in other.model_inputs.items()}
    try:
        found, expected = (
            learner.compute_logprobs_together([sample, one], padding_free=False)[:1]
            for one in (replace(other, model_inputs=inverted), other)
        )
    except REFUSALS:  # left to the other questions
        return False
    return not widest_gap(found, expected) <= NEIGHBOUR


def _with_media(probes: Probes) -> list[Sample]:
    pairs = zip(probes.prompts, probes.responses, strict=True)
    return [_to_sample(prompt, response) for prompt, response in pairs if prompt.model_inputs]


def _set_layout(config: RunConfig, owner: Owner, trained: Trainable, faults: Faults, name: str) -> None:
    settings, key = owner_settings(config, owner), f"worker.{owner}"
    if settings.padding_free and faults.packed is None:
        if settings.share_prompts and faults.shared is not None:
            same = f"as with {key}.share_prompts=false"
            log.warning("%s %s: a prompt is computed with every answer, %s", name, faults.shared, same)
            trained.set_layout("packed")
        return
    if settings.padding_free:
        _require_unshared(config, [owner], f"{name} {faults.packed}")
    if faults.padded is not None:
        log.warning("%s %s: a micro-batch holds one sample", name, faults.padded)
        trained.set_layout("single")
    elif settings.padding_free:
        same = f"as with {key}.padding_free=false"
        log.warning("%s %s: micro-batches are padded, %s", name, faults.packed, same)
        trained.set_layout("padded")


def _require_unshared(config: RunConfig, owners: Sequence[Owner] | dict[Owner, Trainable], fault: str) -> None:
    for owner in owners:
        if (size := config.sequence_ranks(owner)) > 1:
            message = f"shares packed rows, and {fault} on ranks that share it: set 1"
            raise ConfigError([Problem(f"worker.{owner}.ulysses_size", message, str(size))])


def _split_answers(fresh: Probes) -> tuple[list[int], list[int], list[int]]:
    tokens = [token for prompt in fresh.prompts[:2] for token in prompt.token_ids]
    length = max(1, min(12, len(tokens) // 3))
    return tokens[:length], tokens[length : 2 * length], tokens[2 * length : 3 * length]


def _to_sample(prompt: PromptLike, response: Sequence[int]) -> Sample:
    token_ids = torch.tensor([*prompt.token_ids, *response])
    return Sample(
        token_ids=token_ids,
        loss_mask=torch.arange(len(token_ids)) >= 1,
        position_ids=extend_positions(prompt.position_ids, len(response)),
        group_id=0,
        reward=0.0,
        model_inputs=prompt.model_inputs,
    )
