"""`r1 ps`, `r1 stop` and `r1 logs`: the processes of runs and what they print."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r1_cli.commands.common import Existing, FiniteRange, UserError, visible

if TYPE_CHECKING:
    from r1_cli.runs.processes import Process

RUN = Existing(folder=True)
LINES = 10  # of each log
FOLLOW_SECONDS = 0.2  # between two looks


@click.command(short_help="Show the runs of this machine, or the processes of one.")
@click.argument("run", type=RUN, required=False)
def ps(run: Path | None) -> None:
    """Show your runs with a process on this machine, or all processes of RUN, on all its machines.

    \b
      r1 ps
      r1 ps checkpoints/easy_r1/demo
    """
    from r1_cli.runs.processes import DRIVER, find_runs, newest_of, read_processes

    if run is None:
        found = [(path, one) for path in find_runs() for one in read_processes(path) if one.name == DRIVER]
        _print_table(
            ("run", "step", "pid", "state", "since", "host"),
            [(str(path), _step(one), str(one.pid), one.state(), _clock(one.began), one.host) for path, one in found],
            empty="no run of yours is on this machine",
        )
        return
    shown = [
        (one.name, one.host, str(one.pid), one.state(), _gigabytes(one.memory), _gigabytes(one.device_memory),
         f"{time.time() - one.beat:.0f} s ago", _clock(one.began), str(one.restarts or ""))
        for one in newest_of(read_processes(run))
    ]  # fmt: skip
    heads = ("process", "host", "pid", "state", "memory", "device", "heard", "since", "restarts")
    _print_table(heads, shown, empty=f"no process of {run} is recorded: it has ended, or never began")


@click.command(short_help="End a run, and only its own processes.")
@click.argument("run", type=RUN)
@click.option(
    "--grace", type=FiniteRange(min=0), default=60.0, show_default=True, help="Seconds for the run to end by itself."
)
def stop(run: Path, grace: float) -> None:
    """End RUN: SIGTERM to its driver, which saves the last whole step, and then what is left of its processes.

    \b
      r1 stop checkpoints/easy_r1/demo
    If the driver is on another machine that sees the folder, it gets the request within 5 seconds.
    """
    from r1_cli.runs.processes import DRIVER, read_processes, stop_run

    recorded = read_processes(run)
    for driver in recorded:
        if driver.name == DRIVER and not driver.is_here:
            _stop_elsewhere(run, driver, grace)
            return
    try:
        done = stop_run(run, grace)
    except PermissionError as error:
        raise UserError(f"{run} is another user's: {error}") from error
    for line in done or [f"no process of {run} runs on this machine"]:
        click.echo(line)
    others = [one for one in recorded if not one.is_here and time.time() - one.beat < grace]
    if others:
        shown = ", ".join(f"{one.name} on {one.host}" for one in others)
        click.echo(f"the processes on other machines end with the driver: {shown}")


def _stop_elsewhere(run: Path, driver: "Process", grace: float) -> None:
    from r1_cli.runs.processes import SILENT_SECONDS, ask_to_stop

    where = f"the driver of {run}, process {driver.pid} on {driver.host}"
    if time.time() - driver.beat > SILENT_SECONDS:
        raise UserError(f"{where}, has been silent for {time.time() - driver.beat:.0f} s: type r1 stop there")
    try:
        ended = ask_to_stop(run, driver, grace)
    except OSError as error:
        raise UserError(f"{where}, cannot be asked to end: {error}; type r1 stop there") from error
    if not ended:
        raise UserError(f"{where}, has not ended within {grace:.0f} s: type r1 stop there, which kills it")
    click.echo(f"{where}, ended")


@click.command(short_help="Print the logs of a run's processes.")
@click.argument("run", type=RUN)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--follow", "-f", is_flag=True, help="Print what is added, until Ctrl-C.")
@click.option(
    "--lines", "-n", type=click.IntRange(min=0), default=LINES, show_default=True, help="Of the end of each log."
)
def logs(run: Path, names: tuple[str, ...], follow: bool, lines: int) -> None:
    """Print the end of the logs of RUN: of its driver, ranks and engines, or of those with NAME.

    \b
      r1 logs checkpoints/easy_r1/demo
      r1 logs checkpoints/easy_r1/demo learner-1 --follow
    """
    found = {path.stem: path for path in sorted((run / "logs").glob("*.log"))}
    if unknown := [name for name in names if name not in found]:
        raise UserError(f"{run} has no log of {unknown[0]}; it has {', '.join(found) or 'none'}")
    chosen = {name: path for name, path in found.items() if not names or name in names}
    if not chosen and not follow:
        raise UserError(f"{run / 'logs'} has no logs; a run on one device prints to its terminal")
    places = {}
    for name, path in chosen.items():
        text = path.read_bytes()
        last = text.decode(errors="replace").splitlines()[-lines:] if lines else []
        _print_log(name, last, heading=len(chosen) > 1)
        places[path] = len(text)
    try:
        while follow:
            time.sleep(FOLLOW_SECONDS)
            for path in sorted((run / "logs").glob("*.log")):
                if not names or path.stem in names:
                    _print_new(path, places, heading=len(names) != 1)
    except KeyboardInterrupt:
        return


def _print_new(path: Path, places: dict[Path, int], *, heading: bool) -> None:
    """Print the whole lines that a log has got since the last look, and note its new place."""
    begin = places.get(path, 0)
    with path.open("rb") as file:
        file.seek(begin if path.stat().st_size >= begin else 0)  # a shorter file is a new one
        whole, newline, rest = file.read().rpartition(b"\n")
        places[path] = file.tell() - len(rest)
    if newline:
        _print_log(path.stem, whole.decode(errors="replace").splitlines(), heading=heading)


def _print_log(name: str, lines: list[str], *, heading: bool) -> None:
    if heading:
        click.secho(f"==> {name} <==", bold=True)
    for line in lines:
        click.echo(visible(line))


def _print_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, empty: str) -> None:
    if not rows:
        click.echo(empty)
        return
    widths = [max(len(one) for one in column) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        click.echo("  ".join(visible(one).ljust(width) for one, width in zip(row, widths, strict=True)).rstrip())


def _step(process: "Process") -> str:
    return "" if process.step is None else f"{process.step}/{process.steps}" if process.steps else f"{process.step}"


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f} GiB"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
