"""Convert rows to conversations, whatever their format."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from r1_data.cells import brief, naming_row, read_text, require_cell, unwrapped
from r1_data.conversations.pairs import Ending, join_ending, split_pair, split_texts
from r1_data.conversations.tools import read_json, read_tools
from r1_data.conversations.turns import SYSTEM, Tags, read_turns, require_answers, require_order
from r1_data.formats import CONVERSATION_FORMATS, Columns, Detected, detect_once
from r1_data.markers import Cells, no_cells, place_all
from r1_data.messages import apply_format, compile_once, other_columns, require_text
from r1_data.references import Downloads
from r1_data.types import BadPair, Conversation, DataError, Message, MissingColumn, NoAnswer

if TYPE_CHECKING:
    from jinja2 import Template

Wanted = Literal["any", "answers", "pairs", "labels"]
_THOUGHT = "<think>"


@dataclass(frozen=True, slots=True)
class OtherColumns:
    """Names of the columns of fine-tuning rows that `Columns` lacks. A row may lack any of them."""

    rejected: str = "rejected"  # the worse answer of a pair
    label: str = "label"  # whether the answer is desired (KTO); `kto_tag` replaces a missing one
    system: str = "system"
    tools: str = "tools"  # a list of JSON schemas, or its JSON text
    query: str | None = None  # text that follows the prompt; null: `input` behind `instruction`
    history: str = "history"  # (question, answer) of earlier turns
    thinking: str = "thinking"  # reasoning that precedes the answer (R1-V)
    enable_thinking: str = "enable_thinking"  # the chat template's argument of this name (veRL)


@dataclass(frozen=True, slots=True)
class ConversationReader:
    """Converts rows of a source to conversations. It pickles. Raises DataError if the format prompt does not parse.

    Example: `reader("train.jsonl:1", {"messages": [{"role": "user", …}, {"role": "assistant", …}]})`
    """

    columns: Columns = field(default_factory=lambda: Columns("messages", ""))
    explicit_columns: bool = False  # the user named `columns`: known formats are not tried (see `detect`)
    others: OtherColumns = field(default_factory=OtherColumns)
    tags: Tags = field(default_factory=Tags)
    wanted: Wanted = "any"  # what the loss reads of a row; "answers": of a pair, the chosen one
    format_prompt: str | None = None  # Jinja text for the last message of the user, as in `RowReader`
    format_prompt_name: str = "format prompt"
    system_prompt: str | None = None  # for rows without a system message
    image_dir: str | None = None  # relative paths start here, and no path leaves it
    downloads: Downloads | None = None  # None: http and https URLs are refused
    source: str = ""  # the rows' name in reports

    def __post_init__(self) -> None:
        self._template()

    def __call__(self, row_id: str, row: Mapping[str, object]) -> Conversation:
        """Convert a row to a conversation. Raises DataError that begins with `row_id`, and says what to do."""
        with naming_row(row_id):
            return self._read(row_id, row)

    def _read(self, row_id: str, row: Mapping[str, object]) -> Conversation:
        found = detect_once(tuple(row), self.columns, self.explicit_columns, CONVERSATION_FORMATS)
        if not self.explicit_columns:
            require_format(row, found, self.others.thinking)
        columns = found.columns
        draft = self._read_prompt(row, columns)
        if columns.ground_truth:
            draft = self._read_answers(row, found, draft)
        self._add_prompts(draft.prompt, row)
        label = self._read_label(row, columns)
        endings = [draft.answer] if draft.rejected is None else [draft.answer, draft.rejected]
        for ending in endings:
            require_order(draft.prompt + ending)
            require_answers(draft.prompt + ending)
        # A pair's media stand before its answers, in which a marker is text.
        placed = draft.prompt + draft.answer if draft.rejected is None else draft.prompt
        media = place_all(placed, row, columns, draft.embedded, self.image_dir, self.downloads)
        messages = draft.prompt + draft.answer
        require_text([message for message in messages if message["role"] != "assistant"])
        rejected = self._choose(draft.rejected, label)
        thinking = row.get(self.others.enable_thinking)
        return Conversation(
            row_id,
            messages,
            media,
            read_tools(row.get(self.others.tools), self.others.tools),
            other_columns(row, self._names(columns, label), self.source),
            self.source,
            rejected,
            label,
            {"enable_thinking": thinking} if isinstance(thinking, bool) else {},
            None if rejected is None else len(draft.prompt),
        )

    def _read_prompt(self, row: Mapping[str, object], columns: Columns) -> "_Draft":
        draft = _Draft([], no_cells())
        if not columns.prompt:
            return draft
        cell = require_cell(row, columns.prompt, "prompt")
        with naming_column(columns.prompt):
            messages = read_turns(cell, self.tags, draft.embedded)
        if isinstance(cell, str) and messages == [{"role": "user", "content": cell}]:
            if not columns.ground_truth:
                what = f"column {columns.prompt!r} must hold messages, and holds text that is no JSON of a list"
                raise DataError(f"{what}: {brief(cell)}; write it with json.dumps")
            query = self.others.query or ("input" if columns.prompt == "instruction" else "")
            parts = [cell, optional_text(row, query)] if query else [cell]
            messages[0]["content"] = "\n".join(part for part in parts if part)
        if columns.ground_truth:
            exclude_answers(messages)
        draft.prompt = self._read_history(row) + messages
        if (system := optional_text(row, self.others.system)) and not has_system(draft.prompt):
            draft.prompt.insert(0, {"role": "system", "content": system})
        return draft

    def _read_history(self, row: Mapping[str, object]) -> list[Message]:
        cell = unwrapped(row.get(self.others.history))
        what = f"column {self.others.history!r}"
        pairs = read_json(cell, what) if isinstance(cell, str) and cell else cell
        if not isinstance(pairs, list):
            return []
        messages = []
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise DataError(f"{what} must hold pairs of a question and its answer, found {brief(pair)}")
            texts = [read_text(text, self.others.history) for text in pair]
            messages += [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
        return messages

    def _read_answers(self, row: Mapping[str, object], found: Detected, draft: "_Draft") -> "_Draft":
        answer, other = found.columns.ground_truth, self.others.rejected
        cell = require_cell(row, answer, "answer")
        if other not in row:
            ending = self._read_ending(cell, answer)
            if found.format == "r1v" and (thought := optional_text(row, self.others.thinking)):
                ending.messages[0]["content"] = f"{thought}\n\n{ending.messages[0]['content']}"
            return _Draft(*join_ending(draft.prompt, draft.embedded, ending))
        worse = unwrapped(require_cell(row, other, "rejected"))
        if not draft.prompt and isinstance(cell, str) and isinstance(worse, str):
            cell, worse, text = split_texts(cell, worse)
            draft.prompt = [{"role": "user", "content": text}] if text else []
        chosen, rejected = self._read_ending(cell, answer), self._read_ending(worse, other)
        return _Draft(*split_pair(draft.prompt, draft.embedded, chosen, rejected))

    def _read_ending(self, cell: object, column: str) -> Ending:
        embedded = no_cells()
        with naming_column(column):
            return Ending(read_turns(cell, self.tags, embedded, "assistant"), embedded)

    def _add_prompts(self, prompt: list[Message], row: Mapping[str, object]) -> None:
        if (template := self._template()) is not None:
            apply_format(prompt, template, row)
        if self.system_prompt and not has_system(prompt):
            prompt.insert(0, {"role": "system", "content": self.system_prompt})

    def _read_label(self, row: Mapping[str, object], columns: Columns) -> bool | None:
        name = _label_column(row, self.others)
        value = unwrapped(row.get(name))
        if isinstance(value, bool) or value is None:
            return value
        if name == "label" and columns.ground_truth != "completion":
            return None  # of another meaning
        if value in (0, 1):
            return bool(value)
        raise DataError(f"column {name!r} must be true or false, found {brief(value)}")

    def _choose(self, rejected: list[Message] | None, label: bool | None) -> list[Message] | None:
        """Return the rejected answer if the loss reads it. Raises BadPair if it needs more than the row has."""
        others = self.others
        if self.wanted == "pairs" and rejected is None:
            raise BadPair(f"has one answer, but the loss compares two: columns chosen and {others.rejected}")
        if self.wanted == "labels" and label is None:
            raise BadPair(f"has no label, but the loss needs {others.label}=true or false for each answer")
        if self.wanted == "answers" and label is False:
            raise BadPair("its answer is labelled as undesired; train it with sft.loss=kto, or remove the row")
        return None if self.wanted in ("answers", "labels") else rejected

    def _names(self, columns: Columns, label: bool | None) -> set[str]:
        others = self.others
        names = {columns.prompt, columns.ground_truth, columns.images, columns.videos, others.rejected, others.system}
        names |= {others.tools, others.history, others.thinking, others.enable_thinking, others.query or "input"}
        return names if label is None else {*names, others.label, "kto_tag"}

    def _template(self) -> "Template | None":
        return compile_once(self.format_prompt, self.format_prompt_name) if self.format_prompt is not None else None


@dataclass(slots=True)
class _Draft:
    prompt: list[Message]  # all messages, if no column has the answer alone
    embedded: Cells  # the media of their parts, and of the answer's
    answer: list[Message] = field(default_factory=list)
    rejected: list[Message] | None = None


def exclude_answers(prompt: list[Message]) -> None:
    """Mark the answers in a prompt's own messages as not trained, unless they are marked already."""
    for message in prompt:
        if message["role"] == "assistant" and not {"weight", "train"} & message.keys():
            message["train"] = False


def has_system(messages: list[Message]) -> bool:
    return bool(messages) and messages[0]["role"] in SYSTEM


def optional_text(row: Mapping[str, object], column: str) -> str:
    """Return a cell as text, "" for a missing column, null and NaN."""
    value = unwrapped(row.get(column))
    return "" if value is None or value != value else read_text(value, column)


def _label_column(row: Mapping[str, object], others: OtherColumns) -> str:
    return "kto_tag" if others.label not in row and "kto_tag" in row else others.label


@contextmanager
def naming_column(column: str) -> Iterator[None]:
    """Let a DataError name the column."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"column {column!r}: {error}") from error


def require_format(row: Mapping[str, object], found: Detected, thinking: str = "thinking") -> None:
    """Raise an error with what to do if a row has no answer but perhaps a ground truth."""
    columns = found.columns
    missing = [name for name in (columns.prompt, columns.ground_truth) if name and name not in row]
    prompt = detect_once(tuple(row), Columns("", ""), False)
    bare = found.format == "r1v" and thinking not in row and _THOUGHT not in str(row.get(columns.ground_truth))
    if (missing or bare) and prompt.format:
        asked, truth = prompt.columns.prompt, prompt.columns.ground_truth
        raise NoAnswer(
            f"holds a prompt ({asked}) and a ground truth ({truth}), but no answer to train on: `r1 train` learns from "
            f"it, `r1 sample` makes answers of it; if {truth} is the answer itself, set data.prompt_key={asked} "
            f"data.answer_key={truth}"
        )
    if missing:
        raise MissingColumn(
            f"no column of messages or answers; columns found: {', '.join(map(str, row))}. Read are messages; "
            "conversations; prompt and completion; instruction and output; chosen and rejected. data.messages_key, or "
            "data.prompt_key and data.answer_key, name others"
        )
