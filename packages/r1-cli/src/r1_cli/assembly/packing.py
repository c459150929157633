"""Whether a model's sequences may share a row, and a prompt in it: tried at start, and not read off its name."""

import logging
from dataclasses import replace

import torch

from r1_cli.assembly.canary import build_probes
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.root import Owner
from r1_cli.groups.group import extend_positions
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_cli.roles import Critic, Learner
from r1_core.types import Sample
from r1_data.render import Renderer
from r1_rollout.canary import TOLERANCE, widest_gap
from r1_rollout.probes import Probes
from r1_rollout.types import PromptLike

log = logging.getLogger("r1")

# What another neighbour of the same length may change, in any precision: the same kernels round in the same way.
NEIGHBOUR = TOLERANCE[torch.float32]
# What a model's own code may raise at a row that it was not written for.
RAISED = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


def settle_packing(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    renderer: Renderer,
    learner: Learner,
    critic: Critic | None = None,
) -> None:
    """Let the learner pad, and say so, if packing is asked for and its model mixes up the sequences of a row.

    The same for prompts that answers share in a row: they are repeated with every answer if the model cannot read them
    so. A critic, whose model is of the same family, does both for the same reasons.

    Raises:
        ConfigError: ranks are to share the rows, which cannot be padded then.
    """
    actor = config.worker.actor
    packs: list[tuple[Owner, Learner | Critic]] = [("actor", learner)] if actor.padding_free else []
    if critic is not None and config.worker.critic.padding_free:
        packs.append(("critic", critic))
    if not packs:
        return
    probes, fresh = (build_probes(config, model, renderer, variant=variant) for variant in (0, 1))
    tolerance = TOLERANCE[hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)]
    name = model.config.model_type
    fault = find_packing_fault(learner, probes, fresh, tolerance)
    if fault is not None:
        for owner, trained in packs:
            if (size := config.sequence_ranks(owner)) > 1:
                message = f"shares packed rows, and {name} {fault} on ranks that share it: set 1"
                raise ConfigError([Problem(f"worker.{owner}.ulysses_size", message, str(size))])
            log.warning("%s %s: micro-batches are padded, as with worker.%s.padding_free=false", name, fault, owner)
            trained.pad()
        return
    shares = [(owner, trained) for owner, trained in packs if getattr(config.worker, owner).share_prompts]
    if shares and (fault := find_sharing_fault(learner, probes, fresh, tolerance)) is not None:
        for owner, trained in shares:
            same = f"as with worker.{owner}.share_prompts=false"
            log.warning("%s %s: a prompt is computed with every answer, %s", name, fault, same)
            trained.repeat_prompts()


def find_packing_fault(learner: Learner, probes: Probes, fresh: Probes, tolerance: float) -> str | None:
    """Say what a packed row does to its sequences, None if nothing.

    A state that runs through the row (linear attention), or an attention that reads no positions, makes the row one
    long sequence, and nothing but the log-probs shows it. So these must be what each sequence gets alone and padded,
    and those of the last must not change with the one before it.

    Args:
        probes: a short text, a long one and, where the model reads them, a picture.
        fresh: others of the same kinds and lengths.
        tolerance: how far apart other kernels may bring log-probs, see `r1_rollout.canary.TOLERANCE`.
    """
    last, *others = map(_to_sample, probes.prompts, probes.responses)
    other = _to_sample(fresh.prompts[1], fresh.responses[1])
    alone = [learner.logprobs_together([sample], padding_free=False)[0] for sample in (*others, last)]
    try:
        gap = widest_gap(learner.logprobs_together([*others, last], padding_free=True), alone)
        pair, swapped = (learner.logprobs_together([one, last], padding_free=True)[-1:] for one in (others[0], other))
    except RAISED as error:
        return f"cannot read a packed row ({_first_line(error)})"
    leak = widest_gap(swapped, pair)
    if gap <= tolerance and leak <= NEIGHBOUR:
        return None
    return f"takes a packed row for one sequence (log-probs off by {max(gap, leak):.2g} of their size)"


def find_sharing_fault(learner: Learner, probes: Probes, fresh: Probes, tolerance: float) -> str | None:
    """Say what becomes of answers that share their prompt, of a model that can be packed; None if they are the same.

    Two answers to each prompt must have the log-probs that they have behind prompts of their own. Layers that carry a
    state on, or look back a number of tokens of the row, take the first answer for a part of the second.

    Args:
        probes, fresh, tolerance: as in `find_packing_fault`.
    """
    apart, sharing = list[Sample](), list[Sample]()
    for prompt, *answers in zip(probes.prompts, probes.responses, fresh.responses, strict=True):
        apart += [_to_sample(prompt, answer) for answer in answers]
        sharing += [replace(sample, prompt_length=len(prompt.token_ids)) for sample in apart[-2:]]
    try:
        found, expected = (learner.logprobs_together(samples, padding_free=True) for samples in (sharing, apart))
    except RAISED as error:
        return f"cannot read a shared prompt ({_first_line(error)})"
    gap = widest_gap(found, expected)
    if gap <= tolerance:
        return None
    return f"mixes up the answers to a shared prompt (log-probs off by {gap:.2g} of their size)"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _to_sample(prompt: PromptLike, response: list[int]) -> Sample:
    """Look at every token that another one predicts."""
    token_ids = torch.tensor([*prompt.token_ids, *response])
    return Sample(
        token_ids=token_ids,
        loss_mask=torch.arange(len(token_ids)) >= 1,
        position_ids=extend_positions(prompt.position_ids, len(response)),
        group_id=0,
        reward=0.0,
        model_inputs=prompt.model_inputs,
    )
