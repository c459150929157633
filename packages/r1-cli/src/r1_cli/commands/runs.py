"""`r1 diagnose`, `r1 diff`, `r1 report` and `r1 view`: commands that read the folder of a run."""

import json
import socket
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import click

from r1_cli.commands.common import Existing, UserError, user_errors, visible, writing


@click.command(short_help="Say what goes wrong in a run, by its numbers and answers.")
@click.argument("run", type=Existing())
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def diagnose(run: Path, as_json: bool) -> None:
    """Say what goes wrong in RUN: a folder or log of r1, EasyR1 or veRL, or TRL's trainer_state.json.

    The run may still be going on. Exit code 1 if something is found.

    \b
      r1 diagnose checkpoints/easy_r1/demo
      r1 diagnose outputs/checkpoint-500/trainer_state.json --json
    """
    from r1_cli.runs.diagnose.answers import diagnose_run
    from r1_cli.runs.diagnose.signatures import SIGNATURES
    from r1_cli.runs.history import NoHistoryError
    from r1_cli.runs.reader import RunReader

    with user_errors(NoHistoryError):
        reader = RunReader(run)
        history, found = reader.history, diagnose_run(reader)
    last = int(history.steps[-1]["step"])
    if as_json:
        click.echo(json.dumps({"run": str(run), "step": last, "findings": [asdict(one) for one in found]}, indent=2))
    else:
        for one in found:
            click.secho(one.what, fg="yellow")
            click.echo(f"  {visible(one.evidence)}\n  try: {one.advised}")
        count = (
            f"{len(found)} of {len(SIGNATURES) + 2} known troubles" if found else "nothing of what is known to go wrong"
        )
        click.echo(f"{count}, by {len(history.steps)} records up to step {last}")
    if found:
        raise SystemExit(1)


RUN = Existing()


@click.command(short_help="Say what differs between two runs, and where they part.")
@click.argument("run_a", type=RUN)
@click.argument("run_b", type=RUN)
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def diff(run_a: Path, run_b: Path, as_json: bool) -> None:
    """Compare two runs: settings, rows, code, packages, machine, and where their curves part.

    The runs may still be going on. Of logs of EasyR1, veRL and TRL, the curves are compared.

    \b
      r1 diff checkpoints/easy_r1/demo checkpoints/easy_r1/demo_2
    """
    from r1_cli.runs.diff import compare, format_differences
    from r1_cli.runs.history import NoHistoryError
    from r1_cli.runs.reader import RunReader

    with user_errors(NoHistoryError):
        found = compare(RunReader(run_a), RunReader(run_b))
    if as_json:
        click.echo(json.dumps({"runs": [str(run_a), str(run_b)], **asdict(found)}, indent=2))
        return
    for line in format_differences(found):
        click.echo(line)


@click.command(short_help="Write a run's curves, validation and samples into one HTML file.")
@click.argument("run", type=Existing())
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The file; default: RUN/report.html.")
def report(run: Path, output: Path | None) -> None:
    """Write one HTML file about RUN, a run's folder: what ran, curves, validation, time, faults, samples.

    The file needs no network, contains no script, and shows answers as text. The run may still be going on. RUN may be
    the output of `r1 run`: the file is then about all stages, and each that logged steps gets one of its own.

    \b
      r1 report checkpoints/easy_r1/demo
      r1 report checkpoints/easy_r1/demo --output demo.html
    """
    from r1_cli.runs.history import NoHistoryError
    from r1_cli.runs.report.page import write_report
    from r1_cli.runs.report.stages import write_stages_report
    from r1_cli.runs.stages import STAGES_FILE

    file = output or (run if run.is_dir() else run.parent) / "report.html"
    if (run / STAGES_FILE).is_file():
        with writing(file):
            write_stages_report(run, file)
    else:
        with user_errors(NoHistoryError, OSError):
            page = write_report(run)
        with writing(file):
            file.write_text(page, encoding="utf-8", errors="replace")
    click.echo(f"{file} ({file.stat().st_size / 1e6:.2f} MB)")


@click.command(short_help="Show curves and samples of runs in a browser.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; any but loopback asks for a token.")
@click.option("--port", default=6010, show_default=True, type=click.IntRange(1, 65535))
def view(runs: tuple[Path, ...], host: str, port: int) -> None:
    """Show curves and samples of runs in a browser, also while they go on. Needs no network.

    A folder that does not exist yet is shown as soon as a run writes to it. Of the output of `r1 run`, the stages are
    shown that have begun; of folders or logs of EasyR1, veRL and TRL, the numbers.

    \b
      r1 view checkpoints/easy_r1/demo checkpoints/easy_r1/demo_2
    """
    import secrets

    from r1_cli.runs.stages import recorded_folders
    from r1_cli.runs.view.app import build_app
    from r1_cli.runs.view.guard import allowed_hosts
    from r1_rewards.services.serve import is_loopback

    try:
        import uvicorn

        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        app = build_app(recorded_folders(runs), token, allowed_hosts(host))
    except ModuleNotFoundError as error:
        raise UserError(f"r1 view needs {error.name}: pip install 'r1-cli[view]'") from error
    listening = _listen(host, port)
    for run in runs:
        if not run.exists():
            click.echo(f"r1: {run} does not exist yet; it is shown as soon as a run writes there", err=True)
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"http://{shown}:{port}/" + (f"?token={token}" if token else ""))
    settings = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    with suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that the address is printed only once it works.

    Raises:
        UserError: the port is in use, or the address is not one of this machine.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"r1 view cannot listen on --host {host} --port {port} ({error.strerror}); another --port may be free"
        ) from error
    # Connections inherit it. asyncio sets it only on sockets of its own, and a reply would wait 40 ms for an ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
