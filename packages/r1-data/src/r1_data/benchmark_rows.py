"""Check the rows of a benchmark, and bring choices, answers and pictures into one form."""

import ast
import base64
import hashlib
import json
import pickletools
import string
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from r1_data.cells import naming_row, read_text, require_cell
from r1_data.types import DataError, Row, json_columns

TRUTH, CHOICES, IMAGES = "truth", "choices", "images"  # columns that `prepare_row` writes
# What the answer's column holds: the answer; the place of the right choice, from 0; nothing, as the first choice is
# right; the right choice's text; or tests of a program in LiveCodeBench's columns.
AnswerForm = Literal["text", "index", "first", "choice", "tests"]
LETTERS = string.ascii_uppercase
_MARKERS = ("<image {}>", "<image_{}>", "<image{}>")  # of the n-th picture, in questions and choices
_PICTURE = {"bytes", "path"}


@dataclass(frozen=True, slots=True)
class RowForm:
    """How the rows of a benchmark are published."""

    columns: tuple[str, ...]  # every row has them; the digest is over them
    question: str
    answer: str
    answer_form: AnswerForm = "text"
    choices: tuple[str, ...] = ()  # one column that holds a list, or its text; or a column for each choice
    shuffle: bool = False
    images: tuple[str, ...] = ()  # columns; a question without markers shows all of them first
    where: Mapping[str, object] = field(default_factory=dict)  # column -> the value, or a list of values, of rows kept


def write_rows(rows: Iterable[tuple[str, Row]], form: RowForm, path: Path) -> int:
    """Write the rows as JSON lines, and pictures that they hold to the folder of `path`; return their number.

    Raises DataError that names the row.
    """
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row_id, row in rows:
            if not _is_kept(row, form.where):
                continue
            with naming_row(row_id):
                prepared: dict[str, Any] = prepare_row(row, form)
                prepared[IMAGES] = [_store(image, path.parent) for image in prepared[IMAGES]]
                file.write(json.dumps(json_columns(prepared), ensure_ascii=False) + "\n")
            count += 1
    return count


def prepare_row(row: Row, form: RowForm) -> Row:
    """Return the row with the columns `truth`, `choices` and `images`. Raises DataError."""
    choices = _read_choices(row, form.choices)
    question = row.get(form.question) or ""  # empty if a picture shows it
    if isinstance(question, str):
        question, images = _place_pictures(row, form, question, choices)
        row = {**row, form.question: question}
    else:  # messages
        images = [row[name] for name in form.images if row.get(name) is not None]
    order = list(range(len(choices)))
    if form.shuffle:
        digest = digest_row(row, form.columns)
        order.sort(key=lambda place: hashlib.blake2b(f"{digest}/{place}".encode()).digest())
    truth = _read_truth(row, form, choices, order)
    pictures = [name for name in form.images if name not in (form.question, IMAGES)]
    rest = {name: value for name, value in row.items() if name not in pictures}
    return {**rest, TRUTH: truth, CHOICES: [choices[place] for place in order], IMAGES: images}


def digest_row(row: Mapping[str, object], columns: Sequence[str]) -> str:
    """Return the blake2b of these columns as JSON with sorted keys; of a picture's bytes, their blake2b counts."""
    plain = {name: _plain(row.get(name)) for name in columns}
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def check_rows(rows: Sequence[tuple[str, Row]], form: RowForm) -> tuple[int, str]:
    """Return number and digest of the rows. Raises DataError for a row without one of the columns."""
    whole = hashlib.blake2b(digest_size=16)
    for row_id, row in rows:
        missing = [name for name in form.columns if name.partition(".")[0] not in row]
        if missing:
            raise DataError(f"{row_id}: no column {missing[0]!r}; columns found: {', '.join(row)}")
        whole.update(digest_row(row, form.columns).encode())
    return len(rows), f"blake2b:{whole.hexdigest()}"


def _is_kept(row: Mapping[str, object], where: Mapping[str, object]) -> bool:
    return all(row.get(name) in (kept if isinstance(kept, list) else [kept]) for name, kept in where.items())


def _read_choices(row: Mapping[str, object], columns: Sequence[str]) -> list[str]:
    if len(columns) != 1:
        return [str(require_cell(row, name, "choice")).strip() for name in columns]
    value: Any = row.get(columns[0])
    if isinstance(value, str):
        value = _read_list(value, columns[0])
    return [str(choice) for choice in value] if isinstance(value, list | tuple) else []


def _read_list(text: str, column: str) -> Any:
    try:
        return ast.literal_eval(text) if text.strip() else []
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise DataError(f"the column {column!r} is no list of choices: {text[:80]!r}") from error


def _read_truth(row: Mapping[str, object], form: RowForm, choices: Sequence[str], order: Sequence[int]) -> str:
    if form.answer_form == "tests":
        return _read_tests(row, form.answer)
    if form.answer_form == "first":
        return LETTERS[order.index(0)]
    answer = read_text(require_cell(row, form.answer, "answer"), form.answer).strip()
    if form.answer_form == "index":
        place = int(answer) if answer.isdecimal() else -1
    elif form.answer_form == "choice":
        place = choices.index(answer) if answer in choices else -1
    else:
        place = LETTERS.find(answer) if len(answer) == 1 else -1
        if not choices or place < 0:
            return answer
    if not choices and form.answer_form == "choice":
        return answer
    if not 0 <= place < len(choices):
        raise DataError(f"the answer {answer[:80]!r} is none of its {len(choices)} choices")
    return LETTERS[order.index(place)]


def _place_pictures(row: Row, form: RowForm, question: str, choices: list[str]) -> tuple[str, list[object]]:
    """Replace numbered markers by `<image>`, also in `choices`, and return the pictures in the order of markers."""
    cells = {number: row.get(name) for number, name in enumerate(form.images, start=1)}
    if len(form.images) == 1 and isinstance(listed := cells[1], list):
        cells = dict(enumerate(listed, start=1))
    markers = {marker.format(number): number for number in cells for marker in _MARKERS}
    found: list[object] = []

    def place(text: str) -> str:
        places = sorted((start, number) for marker, number in markers.items() for start in _starts(text, marker))
        found.extend(cells[number] for _, number in places)
        for marker in markers:
            text = text.replace(marker, "<image>")
        return text

    question = place(question)
    choices[:] = map(place, choices)
    return question, found or [cell for cell in cells.values() if cell is not None]


def _starts(text: str, marker: str) -> Iterator[int]:
    start = text.find(marker)
    while start >= 0:
        yield start
        start = text.find(marker, start + len(marker))


def _store(image: object, folder: Path) -> object:
    content = image.get("bytes") if isinstance(image, Mapping) else image
    if not isinstance(content, bytes):
        return image.get("path") if isinstance(image, Mapping) else image
    path = folder / "pictures" / hashlib.blake2b(content, digest_size=16).hexdigest()
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return str(path.relative_to(folder))


def _read_tests(row: Mapping[str, object], columns: str) -> str:
    """Return LiveCodeBench's public and private tests as JSON, with the function's name if they are calls."""
    tests: list[object] = []
    for name in columns.split("+"):
        text = str(require_cell(row, name, "tests"))
        tests += json.loads(text if text.lstrip().startswith("[") else _unpack_tests(text, name))
    metadata = json.loads(str(row.get("metadata") or "{}"))
    called = metadata.get("func_name")
    return json.dumps({"tests": tests, "fn_name": called} if called else tests, ensure_ascii=False)


def _unpack_tests(text: str, column: str) -> str:
    """Return the one text in a pickle, compressed and in base64, without unpickling it."""
    try:
        found = [value for _, value, _ in pickletools.genops(zlib.decompress(base64.b64decode(text)))]
    except (ValueError, zlib.error) as error:
        raise DataError(f"the column {column!r} holds no packed tests ({error})") from error
    return next((value for value in found if isinstance(value, str)), "[]")


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return f"blake2b:{hashlib.blake2b(value, digest_size=16).hexdigest()}"
    if isinstance(value, Mapping):
        if value.keys() <= _PICTURE and isinstance(value.get("bytes"), bytes):
            return _plain(value["bytes"])
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
