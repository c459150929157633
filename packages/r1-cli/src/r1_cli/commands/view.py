"""`r1 view`: curves and samples of runs, as a page on this machine."""

import socket
from contextlib import suppress
from pathlib import Path

import click

from r1_cli.commands.errors import UserError


@click.command(short_help="Show curves and samples of runs in a browser.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; any but loopback asks for a token.")
@click.option("--port", default=6010, show_default=True, type=click.IntRange(1, 65535))
def view(runs: tuple[Path, ...], host: str, port: int) -> None:
    """Show curves and samples of runs in a browser, also while they go on. Needs no network.

    A folder that does not exist yet is waited for.

    \b
      r1 view checkpoints/easy_r1/demo checkpoints/easy_r1/demo_2
    """
    import secrets

    from r1_cli.runs.view.app import build_app
    from r1_cli.runs.view.guard import hosts_of, is_loopback

    try:
        import uvicorn

        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        app = build_app(runs, token, hosts_of(host))
    except ModuleNotFoundError as error:
        raise UserError(f"r1 view needs {error.name}: pip install 'r1-cli[view]'") from error
    listening = _listen(host, port)
    for run in runs:
        if not run.is_dir():
            click.echo(f"r1: {run} does not exist yet; it is shown as soon as a run writes there", err=True)
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"http://{shown}:{port}/" + (f"?token={token}" if token else ""))
    with suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, so that the address is printed only once it can be opened.

    Raises:
        UserError: the port is in use, or the address is not one of this machine.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"r1 view cannot listen on --host {host} --port {port} ({error.strerror}); another --port may be free"
        ) from error
