"""What a run says before it starts, and all that a dry run says: the table of its plan, and what to know about it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from r1_cli.config import Limit, Provenance, RunConfig, unavailable, without_effect
from r1_cli.config.sources import Source
from r1_cli.plan.batches import Plan
from r1_cli.plan.memory import Memory

if TYPE_CHECKING:
    from r1_cli.assembly.rows import OpenSource
    from r1_data.dataset import Summary

UNITS = ("B", "KB", "MB", "GB", "TB")


def announce(console: Console, config: RunConfig, provenance: Provenance, plan: Plan) -> None:
    """Print the plan, what this version does not do, what has no effect, and the notices about older keys."""
    console.print(render(plan))
    if limits := unavailable(config, provenance):
        console.print(render_limits("not available in this version", limits))
    if limits := without_effect(config, provenance):
        console.print(render_limits("no effect here", limits))
    for notice in provenance.notices:
        console.print(f"note: {notice}", markup=False, highlight=False, soft_wrap=True)


def render(plan: Plan) -> Table:
    """Return the plan as a table of quantity, value and where it comes from."""
    columns = Column("per run", no_wrap=True), Column(overflow="fold"), Column(min_width=24)
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    at_most = "at most " if plan.is_upper_bound else ""
    rows = [
        ("rows", _number(plan.rows, "not downloaded"), "in train_files or sources"),
        ("validation rows", _validation(plan), "in val_files or val_sources"),
        ("steps per epoch", _number(plan.steps_per_epoch), "rows ÷ prompts per step"),
        ("steps in all", _number(plan.total_steps), "total_epochs or max_steps"),
        ("devices", _number(plan.devices), "nnodes × n_gpus_per_node"),
        ("checkpoints", str(plan.checkpoint_folder), "save_checkpoint_path"),
        None,
        ("prompts", _number(plan.prompts_per_step), "rollout_batch_size"),
        ("sequences", _number(plan.sequences_per_step), "prompts × rollout.n"),
        ("sequences per device", _number(plan.sequences_per_device), "÷ devices"),
        ("log-prob forwards", at_most + _number(plan.experience_forwards), "÷ experience micro batch"),
        ("tokens", f"at most {_number(plan.tokens_per_step)}", "sequences × longest"),
        ("optimizer steps", _number(plan.optimizer_steps_per_step), "÷ global × ppo_epochs"),
        None,
        ("sequences", _number(plan.sequences_per_optimizer_step), "global batch × rollout.n"),
        ("sequences per device", _number(plan.sequences_per_optimizer_step_and_device), "÷ devices"),
        ("accumulations", at_most + _number(plan.accumulations), "÷ update micro batch"),
        ("tokens per micro-batch", f"at most {_number(plan.tokens_per_micro_batch)}", "micro batch × longest"),
        None,
        *_memory_rows(plan.memory),
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
    """Return where the rows come from, which row format was found in them, and what is special about each source.

    Args:
        sources: of training, then of validation.
        opened: the same, opened; None where that takes a download.
        checked: what the check of each found, None where none was made.
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
    """Return the row format of a source and the columns of its prompts and answers, as a table shows them."""
    columns = one.detected.columns
    return one.detected.format or "as named", escape(f"{columns.prompt}, {columns.ground_truth}")


def render_limits(title: str, limits: list[Limit]) -> Table:
    """Return options and reasons as a table."""
    table = Table(Column(title, no_wrap=True), "", box=box.SIMPLE_HEAD, pad_edge=False)
    for limit in limits:
        table.add_row(str(limit), limit.reason)
    return table


def size_text(size: int) -> str:
    """Return a number of bytes for people, e.g. `1.5 GB`."""
    amount, unit = float(size), 0
    while amount >= 1000 and unit < len(UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.3g} {UNITS[unit]}"


def _memory_rows(memory: Memory | None) -> list[tuple[str, str, str]]:
    if memory is None:
        return [("model states", "unknown (hub model)", "model_path")]
    return [
        ("weights", size_text(memory.weights), f"{memory.parameters:,} parameters"),
        ("gradients", size_text(memory.gradients), "one per trained weight"),
        ("optimizer states", size_text(memory.optimizer), "optim.strategy"),
        ("reference", size_text(memory.reference), "none with disable_kl"),
        ("engine's copy", size_text(memory.engine), "rollout.dtype"),
        ("model states", size_text(memory.total), "beside activations"),
    ]


def _number(value: int | None, unknown: str = "unknown") -> str:
    return unknown if value is None else f"{value:,}"


def _validation(plan: Plan) -> str:
    return _number(plan.val_rows, "not downloaded") if plan.has_validation else "none"
