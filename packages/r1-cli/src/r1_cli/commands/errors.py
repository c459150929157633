"""How a command ends when the user has something to correct: one block on stderr, exit code 2, no traceback."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ANY_WORDS = {"ignore_unknown_options": True}  # what looks like an option but is none is explained by load_config


class UserError(click.ClickException):
    """Something to correct before running again."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"r1: {self.message}", err=True, file=file)


@contextmanager
def told_plainly(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds, whose messages are written for users, into a `UserError`."""
    try:
        yield
    except kinds as error:
        message = str(error) or type(error).__name__
        raise UserError("\n".join([message, *getattr(error, "__notes__", ())])) from error


@contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Turn an OSError into a `UserError` that names `path`, if the disk is full or `path` cannot be written.

    The operating system names no file where a write fails, only where opening one does.
    """
    try:
        yield
    except OSError as error:
        if path is None or (error.errno not in FULL and str(error.filename) != str(path)):
            raise
        raise UserError(f"{path} cannot be written: {error.strerror}; name another place") from error


def visible(text: str) -> str:
    """Return `text` without characters that could control a terminal, but for ends of lines."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)
