"""Print the plan of a run and notes on it, at start and in a dry run."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table

from r1_cli.checkpoint.folders import NOTHING_SAVED
from r1_cli.config import Provenance, RunConfig, without_effect
from r1_cli.config.sources import Source, validation_sources
from r1_cli.placement import EnginePlacement, Placement, RankPlacement
from r1_cli.plan.batches import Plan
from r1_cli.plan.disk import checkpoint_bytes, checkpoints_kept, free_space, size_text
from r1_cli.plan.memory import Memory
from r1_cli.plan.phases import Phase, find_phases, find_remedies

if TYPE_CHECKING:
    from r1_cli.build.rows import OpenSource
    from r1_cli.train.episodes.agents import Player
    from r1_data.dataset import Summary

WIDEST = 1000  # characters of a table that is not on a terminal


def announce(
    console: Console, config: RunConfig, provenance: Provenance, plan: Plan, placement: Placement | None = None
) -> None:
    show_table(console, render(plan))
    if placement and placement.ranks:
        show_table(console, render_placement(placement))
    show_notes(console, config, provenance, plan)


def show_notes(console: Console, config: RunConfig, provenance: Provenance, plan: Plan) -> None:
    lines = [f"checkpoints go to {plan.checkpoint_folder}" if config.trainer.save_freq > 0 else NOTHING_SAVED]
    if config.trainer.save_freq > 0 and (size := checkpoint_bytes(config)):
        lines.append(f"  each about {size_text(size)}, and as much of the processors' memory while it is written")
    limits = without_effect(config, provenance)
    lines += ["no effect here:", *(f"  {limit}: {limit.reason}" for limit in limits)] if limits else []
    for note in (*find_oddities(config, plan), *provenance.notices):
        lines.append(f"note: {note}")
    show_lines(console, lines)


def show_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_phases(console: Console, config: RunConfig, plan: Plan, card: int | None) -> None:
    """Print the GPU memory of each phase, and what to set if it exceeds `card` bytes (None: not compared)."""
    if plan.memory is None:
        return
    phases = find_phases(config, plan.memory, card)
    show_table(console, render_phases(phases, card))
    for warning in memory_warnings(config, phases, card):
        console.print(f"note: {warning}", markup=False, highlight=False, soft_wrap=True)


def memory_warnings(config: RunConfig, phases: Sequence[Phase], card: int | None) -> list[str]:
    """Return what to set if a phase exceeds the `card` bytes of a GPU (None: no GPU)."""
    if card is None or all(phase.total <= card for phase in phases):
        return []
    settings = find_remedies(config, card)
    advice = "it would with " + " ".join(settings) if settings else "take a smaller model, or more devices"
    return [f"a step takes more than the {size_text(card)} of this GPU: {advice}"]


def render_phases(phases: Sequence[Phase], card: int | None) -> Table:
    of = "" if card is None else f" of {size_text(card)}"
    table = Table(f"phase, on a GPU{of}", "about", "of which", box=box.SIMPLE_HEAD, pad_edge=False)
    for phase in phases:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in phase.parts.items() if size)
        table.add_row(phase.name, size_text(phase.total), parts)
    return table


def find_oddities(config: RunConfig, plan: Plan) -> list[str]:
    """Return notes on settings that are allowed and rarely intended."""
    notes = []
    rollout = config.worker.rollout
    actor = config.worker.actor
    if actor.share_prompts and not actor.shares_prompts:
        notes.append(
            "a prompt is computed with every answer: worker.actor.share_prompts takes worker.actor.padding_free=true"
        )
    if config.on_cluster and rollout.engine_size < rollout.tensor_parallel_size:
        notes.append(
            f"worker.rollout.tensor_parallel_size={rollout.tensor_parallel_size} has no effect: an embedded engine has "
            "one device"
        )
    if (size := checkpoint_bytes(config)) and (kept := checkpoints_kept(config, plan.total_steps)):
        folder, free = free_space(config.trainer.checkpoint_folder)
        if free < kept * size:
            notes.append(
                f"{kept} checkpoints of about {size_text(size)} come to lie in {folder}, which has {size_text(free)} "
                "free: lower trainer.save_limit, or set trainer.save_model_only"
            )
    if config.worker.teacher.used:
        notes.append(describe_distillation(config))
    if config.data.curriculum.by == "online":
        notes.append(describe_online(config))
    if config.trainer.max_staleness or config.keeps_surplus:
        notes.append(_correction_note(config))
    if config.trainer.val_freq > 0 and not validation_sources(config.data):
        notes.append("there is nothing to validate on (data.val_files=null): no checkpoint will be known as the best")
    return notes


def describe_distillation(config: RunConfig) -> str:
    settings = config.algorithm.distillation
    if settings.form == "loss" and settings.topk:
        term = (
            f"{settings.coef:g} · {settings.divergence} over the teacher's {settings.topk} most likely tokens and one "
        )
        term += "bin of all others, in the loss"
    elif settings.form == "loss":
        term = f"{settings.coef:g} · {settings.divergence} of policy and teacher over the vocabulary, in the loss"
    else:
        term = f"{settings.coef:g} · (log teacher − log policy) of each sampled token, in its advantage"
    rewards = "beside the task's advantages" if config.learns_task else "rewards are shown and not trained on"
    return f"distillation: {term}; {rewards}"


def describe_online(config: RunConfig) -> str:
    settings = config.data.curriculum
    drawn = f"rows are drawn whose pass rate seems nearest to {settings.target:g}, {settings.explore:.0%} by lot"
    if config.algorithm.online_filtering:
        return f"data.curriculum.by=online: {drawn}"
    advice = "in a controlled comparison this paid only with algorithm.online_filtering=true (docs/sampling.md)"
    return f"data.curriculum.by=online: {drawn}; {advice}"


def _correction_note(config: RunConfig) -> str:
    key, level = "algorithm.rollout_correction.rollout_is", config.importance_weights
    if staleness := config.trainer.max_staleness:
        drawn = (
            f"trainer.max_staleness={staleness}: samples are drawn by weights that are {staleness} or more steps old"
        )
    else:
        age = config.algorithm.surplus_max_age
        later = f"up to {age} step{'s' * (age > 1)} later"
        drawn = f"algorithm.surplus_max_age={age}: groups that a step did not need are trained on {later}"
    if level is None:
        return f"{drawn}, and nothing corrects for that ({key}=null): set {key}=token"
    return f"{drawn}; importance weights by {level} correct for that ({key}={level}; null turns it off)"


def show_table(console: Console, table: Table) -> None:
    """Print a table; in full width to a file or a pipe, so that paths stay whole."""
    if not console.is_terminal:
        wanted = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
        console = Console(file=console.file, width=max(wanted, console.width), quiet=console.quiet)
    console.print(table)


def render(plan: Plan) -> Table:
    columns = Column("per run", no_wrap=True), "", ""
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    shared = plan.devices_per_sequence
    critics = plan.critic_devices_per_sequence if plan.critic_steps_per_step else shared
    each, cut = ("device", "÷ devices") if shared == 1 else (f"{shared} devices", "÷ devices × ulysses_size")
    once = "each prompt once, and its answers" if plan.shares_prompts else ""
    rows = [
        ("rows", _number(plan.rows, "not downloaded"), "in train_files or sources"),
        *([("rows outside the band", _number(plan.outside), "data.curriculum.band")] if plan.outside else []),
        ("validation rows", _validation(plan), "in val_files or val_sources"),
        ("steps per epoch", _number(plan.steps_per_epoch), "rows ÷ prompts per step"),
        ("steps in all", _number(plan.total_steps), "total_epochs or max_steps"),
        ("devices", _number(plan.devices), "nnodes × n_gpus_per_node"),
        *([("devices per sequence", _number(shared), "ulysses_size")] if shared > 1 else []),
        *([("the critic's", _number(critics), "worker.critic.ulysses_size")] if critics != shared else []),
        None,
        ("prompts", _number(plan.prompts_per_step), "rollout_batch_size"),
        ("sequences", _number(plan.sequences_per_step), "prompts × rollout.n"),
        (f"sequences per {each}", _number(plan.sequences_per_device), cut),
        ("log-prob forwards", _passes(plan, plan.experience_forwards), "÷ …_for_experience"),
        ("tokens", f"at most {_number(plan.tokens_per_step)}", once or "sequences × longest"),
        ("optimizer steps", _number(plan.optimizer_steps_per_step), "÷ global × ppo_epochs"),
        *_critic_rows(plan),
        None,
        ("sequences", _number(plan.sequences_per_optimizer_step), "global batch × rollout.n"),
        (f"sequences per {each}", _number(plan.sequences_per_optimizer_step_and_device), cut),
        ("accumulations", _passes(plan, plan.accumulations), "÷ …_for_update"),
        ("tokens per micro-batch", _at_most(plan.tokens_per_micro_batch), "micro batch × longest"),
        None,
        *memory_rows(plan.memory),
    ]
    headings = iter(("per step", "per optimizer step", "memory per device"))
    for row in rows:
        if row is None:
            table.add_section()
            table.add_row(f"[bold]{next(headings)}[/bold]", "", "")
        else:
            table.add_row(*row)
    return table


def render_sources(
    sources: Sequence[Source], opened: "Sequence[OpenSource | None]", checked: "Sequence[Summary] | None" = None
) -> Table:
    """Return a table of the sources.

    Args:
        sources: of training, then validation.
        opened: opened sources; None if not local.
        checked: summaries of their checks.
    """
    table = Table("source", "rows", "kept", "format", "prompt and answer", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, (source, one) in enumerate(zip(sources, opened, strict=True)):
        own = [
            "" if source.weight is None else f"weight {source.weight:g}",
            "" if source.n is None else f"{source.n} answers",
            source.reward_function or "",
        ]
        table.add_row(
            escape(source.name),
            _number(len(one.rows) if one else None, "not downloaded"),
            _number(checked[index].kept if checked else None, "not checked"),
            *(found_format(one) if one else (source.row_format or "", "")),
            escape(", ".join(filter(None, own))),
        )
    return table


def found_format(one: "OpenSource") -> tuple[str, str]:
    columns = one.detected.columns
    names = filter(None, (columns.prompt, columns.ground_truth))
    return one.detected.format or "columns as set", escape(", ".join(names))


def render_placement(placement: Placement) -> Table:
    table = Table("placement", "node", "devices", box=box.SIMPLE_HEAD, pad_edge=False)
    roles: tuple[Sequence[RankPlacement | EnginePlacement], ...] = (placement.ranks, placement.engines)
    for placements in roles:
        for _, group in groupby(placements, key=lambda placement: placement.node.id):
            own = list(group)
            names = own[0].name if len(own) == 1 else f"{own[0].name} … {own[-1].name}"
            table.add_row(names, own[0].node.address, ", ".join(chain.from_iterable(one.devices for one in own)))
    return table


def _critic_rows(plan: Plan) -> list[tuple[str, str, str]]:
    steps = plan.critic_steps_per_step
    return [("the critic's", _number(steps), "÷ critic.global × its epochs")] if steps else []


TEACHERS_PLACE = "worker.teacher.offload: on the host; of the policy itself: a copy of what is trained"


def memory_rows(
    memory: Memory | None, *, engine: bool = True, reference: str = "none with disable_kl or lora"
) -> list[tuple[str, str, str]]:
    if memory is None:
        return [("model states", "unknown (hub model)", "model_path")]
    sampling = "weights for sampling", size_text(memory.engine), "rollout.dtype; none apart, factors of a shared base"
    weights = f"{memory.parameters:,} parameters"
    if memory.trained < memory.parameters:
        weights += f", {memory.trained:,} trained"
    return [
        ("weights", size_text(memory.weights), weights),
        ("gradients", size_text(memory.gradients), "one per trained weight"),
        ("optimizer states", size_text(memory.optimizer), "optim.strategy"),
        ("reference", size_text(memory.reference), reference),
        *([("teacher", size_text(memory.teacher), TEACHERS_PLACE)] if memory.teacher else []),
        *([sampling] if engine else []),
        *([("critic", size_text(memory.critic.total), "weights, gradients, optimizer")] if memory.critic else []),
        ("model states", size_text(memory.total), "beside activations"),
    ]


def _passes(plan: Plan, count: int | None) -> str:
    return _at_most(count) if plan.is_upper_bound or count is None else _number(count)


def _at_most(value: int | None) -> str:
    return "auto, found at start" if value is None else f"at most {value:,}"


def _number(value: int | None, unknown: str = "unknown") -> str:
    return unknown if value is None else f"{value:,}"


def _validation(plan: Plan) -> str:
    return _number(plan.val_rows, "not downloaded") if plan.has_validation else "none"


# --- episodes ---------------------------------------------------------------------------------------------------------


def describe_player(player: "Player") -> list[str]:
    """Return lines for `r1 check` and the plan at the start of a run."""
    template = [f"chat template: {line}" for line in player.renderer.info.lines()]
    kinds = [_describe_actor(player, name) for name in player.environments.kinds]
    return [*kinds, _describe_limits(player), _describe_history(player), *template]


def _describe_history(player: "Player") -> str:
    renderer = player.renderer
    if renderer.history == "sampled":
        return "history: the policy sees its turns as it sampled them"
    kinds = player.environments.kinds.values()
    forks = dict.fromkeys(renderer.info.describe_forks(after_user=not kind.tools) for kind in kinds)
    return f"history: the policy sees its turns as the chat template shows them: {', or '.join(forks)}"


def _describe_actor(player: "Player", kind: str) -> str:
    environments, renderer = player.environments.kinds[kind], player.renderers.get(kind, player.renderer)
    names = ", ".join(str(tool["function"]["name"]) for tool in environments.tools)
    if environments.setup.agent:
        judged = "judged by the reward that it gives, otherwise by the run's reward function"
        return f"episodes: the agent {environments.setup.agent} samples from the policy over HTTP; {judged}"
    if environments.setup.environment:
        actor = f"the environment {environments.setup.environment} answers the policy"
        actor += f" with the tools {names}" if names else ", reading the text of its turns"
    else:
        actor = f"tools answer the policy: {names}"
    judge = "its own score" if environments.scores else "the run's reward function"
    written = f", calls written as {renderer.tool_format.name}" if names else ""
    return f"episodes{kind and f' of {kind}'}: {actor}{written}; {judge} judges an episode"


def _describe_limits(player: "Player") -> str:
    return f"limits of an episode: {', '.join(_limits(player))}; scheduling: {'rounds' if player.rounds else 'arrival'}"


def _limits(player: "Player") -> Iterator[str]:
    limits, setup = player.limits, player.environments.setup
    if limits.max_turns < limits.max_tokens:  # else the tokens end an episode first
        yield f"{limits.max_turns} turns of the policy"
    yield f"{limits.max_tokens:,} tokens behind the prompt"
    if limits.max_turn_tokens is not None:
        yield f"{limits.max_turn_tokens:,} tokens a turn"
    if not setup.agent:
        yield f"{setup.tool_timeout:g} s a call"
    if setup.episode_timeout is not None:
        yield f"{setup.episode_timeout:g} s in all"
    if player.max_concurrent is not None:
        yield f"{player.max_concurrent} episodes at a time"
