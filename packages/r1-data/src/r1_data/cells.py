"""Read the cells of a row: columns by name, and any value as text."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal

from r1_data.types import DataError, EmptyCell, MissingColumn


@contextmanager
def naming_row(row_id: str) -> Iterator[None]:
    """Raise any error as a DataError that begins with `row_id`: rows may hold anything."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{row_id}: {error}") from error
    except Exception as error:
        raise DataError(f"{row_id}: the row cannot be read ({type(error).__name__}: {error})") from error


def require_cell(row: Mapping[str, object], column: str, role: str) -> object:
    value: object = row
    for name in [column] if column in row else column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise MissingColumn(f"no {role} column {column!r}; columns found: {', '.join(map(str, row))}")
        value = value[name]
    if value is None:
        raise EmptyCell(f"the {role} column {column!r} is empty")
    return value


def read_text(value: object, column: str) -> str:
    what = f"the answer column {column!r}"
    value = value if isinstance(value, str) else unwrapped(value)
    if value is None:
        raise EmptyCell(f"{what} is empty")
    if isinstance(value, list | tuple | dict):
        text = _as_json(value, what)
    elif (isinstance(value, float | Decimal) and not math.isfinite(value)) or value != value:  # NaT, too
        raise EmptyCell(f"{what} holds {value}, which is not a number")
    else:
        text = decoded(value, what)
    require_unicode(text, what)
    return text


def _as_json(value: object, what: str) -> str:
    if not value:
        raise EmptyCell(f"{what} is empty: {value}")
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, default=lambda part: decoded(unwrapped(part), what)
        )
    except DataError:
        raise
    except ValueError as error:
        raise EmptyCell(f"{what} holds {brief(value)}, in which something is not a number ({error})") from error


def unwrapped(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else value


def decoded(value: object, what: str) -> str:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{what} holds bytes that are not UTF-8 text ({error})") from error


def require_unicode(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{what} holds half of a surrogate pair, which is no text, at {error.start}") from error


def is_visible(text: str) -> bool:
    return any(letter.isprintable() and not letter.isspace() for letter in text)


def brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
