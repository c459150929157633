"""The plan of a fine-tuning run: rows, tokens, steps and memory."""

from dataclasses import dataclass
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from r1_cli.checkpoint.folders import NOTHING_SAVED
from r1_cli.config import Provenance, RunConfig
from r1_cli.placement import Placement
from r1_cli.plan.announce import memory_rows, render_placement, show_lines, show_table
from r1_cli.plan.memory import Memory, estimate
from r1_cli.train.demonstrations import Demonstrations
from r1_data.types import DataError

LOOKED_AT = 32  # rows, evenly spread, whose trained tokens are counted


@dataclass(frozen=True, slots=True)
class FineTuningPlan:
    rows: int  # that are trained on
    left_out: int
    outside: int  # left out by the curriculum
    val_rows: int
    tokens: float  # trained, of an average row
    steps_per_epoch: int
    total_steps: int
    memory: Memory | None  # per device; None if the model is not a local folder


def make_plan(
    config: RunConfig, rows: Demonstrations, left_out: int, val_rows: int, steps_per_epoch: int, outside: int = 0
) -> FineTuningPlan:
    """Return the plan; `config` is that of `as_training`, and `rows` are rendered, those of an even spread."""
    steps = config.trainer.max_steps or config.sft.epochs * steps_per_epoch
    counts = list[int]()
    for place in range(0, len(rows), max(len(rows) // LOOKED_AT, 1)):
        try:
            counts.append(sum(sum(one.loss_mask) for one in rows[place]))
        except DataError:  # reported when it is trained on
            continue
    tokens = fmean(counts) if counts else 0.0
    read = len(rows) - outside
    return FineTuningPlan(read, left_out, outside, val_rows, tokens, steps_per_epoch, steps, estimate(config))


def show_plan(
    console: Console, config: RunConfig, provenance: Provenance, plan: FineTuningPlan, placement: Placement
) -> None:
    sft, rows = config.sft, config.worker.actor.global_batch_size
    table = Table("fine-tuning", "", "", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_row("rows", f"{plan.rows:,}", f"{plan.left_out:,} left out" if plan.left_out else "")
    if plan.outside:
        table.add_row("rows outside the band", f"{plan.outside:,}", "data.curriculum.band")
    table.add_row("validation rows", f"{plan.val_rows:,}" if plan.val_rows else "none", "")
    table.add_row("loss", sft.loss, f"sft.turns={sft.turns}")
    table.add_row("trained tokens per epoch", f"about {plan.tokens * plan.rows:,.0f}", f"{plan.tokens:,.1f} a row")
    table.add_row("rows per step", f"{min(rows, plan.rows):,}", "worker.actor.global_batch_size")
    last = (plan.rows - 1) % rows + 1
    table.add_row("steps per epoch", f"{plan.steps_per_epoch:,}", f"the last of {last:,} rows" if last < rows else "")
    source = "trainer.max_steps" if config.trainer.max_steps else f"sft.epochs={sft.epochs}"
    epochs = f"{plan.total_steps / plan.steps_per_epoch:.3g}"
    passes = f"{epochs} {'epoch' if epochs == '1' else 'epochs'}"
    table.add_row("steps in all", f"{plan.total_steps:,}", f"{source}, {passes}")
    table.add_section()
    reference = "the start; none with lora" if sft.needs_reference else f"sft.loss={sft.loss} needs none"
    for row in memory_rows(plan.memory, engine=sft.val_generations, reference=reference):
        table.add_row(*row)
    show_table(console, table)
    if placement.ranks:
        show_table(console, render_placement(placement))
    saves = config.trainer.save_freq > 0
    lines = [f"checkpoints go to {config.trainer.checkpoint_folder}" if saves else NOTHING_SAVED]
    show_lines(console, [*lines, *(f"note: {notice}" for notice in provenance.notices)])
