"""What commands share: errors that users can correct, argument types, and process settings."""

import errno
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ANY_WORDS = {"ignore_unknown_options": True}  # load_config explains words that look like unknown options


class UserError(click.ClickException):
    """An error that the user can correct: one block on stderr, exit code 2, no traceback."""

    exit_code = 2

    def show(self, file: IO[str] | None = None) -> None:
        click.echo(f"r1: {self.message}", err=True, file=file)


class Existing(click.Path):
    """A path that must exist; the error suggests a similar name or says where r1 looked."""

    def __init__(self, *, folder: bool = False, file: bool = False) -> None:
        super().__init__(exists=True, file_okay=not folder, dir_okay=not file, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            from r1_cli.config.files import where_or_near

            if Path(value).exists():
                raise
            told = f"{error.message.rstrip('.')}{where_or_near(str(value))}"
            raise click.BadParameter(told, ctx=ctx, param=param) from error


class FiniteRange(click.FloatRange):
    """A number in a range, which is neither NaN nor infinite: each comparison with NaN would let it pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found

    def _describe_range(self) -> str:
        return super()._describe_range() if (self.min, self.max) != (None, None) else "any number"


def endpoint_options(command: Command) -> Command:
    """Add the options of a model that an OpenAI-compatible server answers for."""
    options = (
        click.option("--served-name", help="Of the model of an endpoint; MODEL is then its address."),
        click.option(
            "--api-key-env", default="OPENAI_API_KEY", show_default=True, help="Variable with an endpoint's key."
        ),
        click.option(
            "--concurrency", type=click.IntRange(min=1), default=32, show_default=True, help="Requests at a time."
        ),
        click.option(
            "--timeout", type=FiniteRange(min=0.01), default=600.0, show_default=True, help="Seconds a request."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds, whose messages are written for users, into a `UserError`."""
    try:
        yield
    except kinds as error:
        message = str(error) or type(error).__name__
        raise UserError("\n".join([message, *vars(error).get("__notes__", ())])) from error


@contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Turn an OSError into a `UserError` that names `path`, if the disk is full or `path` cannot be written.

    The operating system names the file only if opening fails.
    """
    try:
        yield
    except OSError as error:
        if path is None or (error.errno not in FULL and str(error.filename) != str(path)):
            raise
        raise UserError(f"{path} cannot be written: {error.strerror}; name another place") from error


def visible(text: str) -> str:
    """Return `text` without control characters except newlines."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


# Rounds that a waiting OpenMP thread spins before it sleeps. The default, about 300,000, holds a core for milliseconds:
# with other processes on the machine, a step of small models takes 30 times as long.
SPINS = "10000"


def share_processors() -> None:
    """Let waiting OpenMP threads yield soon, unless the user configured them. Call this before torch loads."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
