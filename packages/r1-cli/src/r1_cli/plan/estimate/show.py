"""Print an estimate in at most 100 columns."""

import math

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from r1_cli.plan.disk import size_text
from r1_cli.plan.estimate.estimate import Estimate

WIDTH = 100  # columns


def show(console: Console, found: Estimate) -> None:
    narrow = Console(file=console.file, width=min(WIDTH, console.width) if console.is_terminal else WIDTH)
    narrow.print(_memory(found))
    if found.host:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in found.host.items())
        whole = size_text(sum(found.host.values()))
        narrow.print(f"memory of each machine, besides Python and data: {whole} ({parts})", highlight=False)
    if found.times:
        narrow.print(_times(found))
    if not found.fits and found.ways:
        narrow.print(_ways(found))
    for note in found.notes:
        narrow.print(f"assumed: {note}", markup=False, highlight=False)
    for line in _verdict(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _memory(found: Estimate) -> Table:
    title = f"{escape(found.devices)}, {size_text(found.capacity)} for each"
    columns = Column("phase"), Column("about", justify="right", no_wrap=True), "of which"
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for phase in found.phases:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in phase.parts.items() if size)
        mark = "" if phase.total <= found.capacity else "[red]"
        table.add_row(phase.name, f"{mark}{size_text(phase.total)}", parts)
    return table


def _times(found: Estimate) -> Table:
    columns = Column("phase"), Column("seconds", justify="right", no_wrap=True), Column("share", justify="right")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    total = sum(found.times.values())
    for name, seconds in found.times.items():
        table.add_row(name, _seconds(seconds), f"{seconds / total:.0%}")
    what = "sampled " if "sampling" in found.times else ""
    ahead = ", sampling ahead" if found.overlaps else ""
    table.add_row(f"a step{ahead}", _seconds(found.seconds), f"{found.tokens / found.seconds:,.0f} {what}tokens/s")
    return table


def _ways(found: Estimate) -> Table:
    sizes = [Column(name, justify="right", no_wrap=True) for name in ("GPU", "machine")]
    columns = Column("way"), Column("settings", no_wrap=True), *sizes, Column("fits")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, title="ways to run it", title_justify="left")
    for way in found.ways:
        fits = "yes" if way.device <= found.capacity else "[red]no"
        table.add_row(way.name, "\n".join(way.settings), size_text(way.device), size_text(way.host), fits)
    return table


def _seconds(seconds: float) -> str:
    digits = max(0, 1 - math.floor(math.log10(seconds))) if seconds > 0 else 1
    return f"{seconds:,.{digits}f}"


def _verdict(found: Estimate) -> list[str]:
    largest = max(found.phases, key=lambda phase: phase.total)
    message = f"{largest.name} takes {size_text(largest.total)} of {size_text(found.capacity)}"
    if found.fits:
        return [f"it fits: {message}"]
    if not found.remedies:
        return [f"it does not fit: {message}", "no setting is enough: take a smaller model, LoRA, or more devices"]
    lines = [f"it does not fit: {message}; it would with"]
    return lines + [f"  {text}  (without it {size_text(saved)} more)" for text, saved in found.remedies]
