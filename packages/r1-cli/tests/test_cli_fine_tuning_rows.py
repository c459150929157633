"""Sources of fine-tuning rows: which columns a configuration reads, and what it says of rows without an answer."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.config.data import DataConfig
from r1_cli.config.sources import training_sources
from r1_cli.plan.announce import found_format
from r1_data.conversations import Wanted
from r1_data.types import Conversation, DataError

TURNS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
QUESTION, ANSWER, WORSE = *TURNS, {"role": "assistant", "content": "3"}


def opened(folder: Path, row: dict[str, Any], wanted: Wanted = "any", **data: Any) -> OpenSource:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [source] = open_sources(training_sources(DataConfig(train_files=str(path), **data)), wanted)
    return source


def read(source: OpenSource) -> Conversation:
    return pickle.loads(pickle.dumps(source.conversation_reader))(*source.rows[0])


@pytest.mark.parametrize(
    ("row", "data", "found"),
    [
        ({"messages": TURNS, "answer": "2"}, {}, ("messages", "messages")),
        ({"prompt": "1 + 1?", "completion": "2"}, {}, ("completion", "prompt, completion")),
        ({"dialog": TURNS}, {"messages_key": "dialog"}, ("columns as set", "dialog")),
        ({"question": "1 + 1?", "answer": "2"}, {"prompt_key": "question"}, ("columns as set", "question, answer")),
        ({"messages": TURNS, "prompt": "1 + 1?", "completion": "2"}, {"row_format": "completion"}, None),
        ({"dialog": [QUESTION], "chosen": ANSWER, "rejected": WORSE}, {"messages_key": "dialog"}, None),
        ({"talk": [{"by": "q", "say": "1 + 1?"}, {"by": "a", "say": "2"}]}, {
            "messages_key": "talk",
            "tags": {"role_tag": "by", "content_tag": "say", "user_tag": "q", "assistant_tag": "a"},
        }, None),
    ],
)  # fmt: skip
def test_a_source_reads_the_columns_that_it_names_or_that_are_found(
    tmp_path: Path, row: dict[str, Any], data: dict[str, Any], found: tuple[str, str] | None
) -> None:
    source = opened(tmp_path, row, **data)
    assert found in (None, found_format(source))
    assert read(source).messages == TURNS
    assert read(source).rejected == ([WORSE] if "chosen" in row else None)


def test_a_source_may_have_columns_tags_and_a_system_prompt_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "1 + 1?", "good": "2", "bad": "3", "functions": [{"name": "f"}]}) + "\n")
    own = {"prompt_key": "question", "answer_key": "good", "tools_key": "functions", "columns": {"rejected": "bad"}}
    data = DataConfig.model_validate({"sources": [{"files": str(path), "system_prompt": "Add.", **own}]})
    [source] = open_sources(training_sources(data), "pairs")
    found = read(source)
    assert found.messages == [{"role": "system", "content": "Add."}, *TURNS]
    assert (found.rejected, found.tools[0]["function"]["name"]) == ([WORSE], "f")


def test_what_the_loss_reads_reaches_the_reader(tmp_path: Path) -> None:
    row = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    assert read(opened(tmp_path, row, "answers")).rejected is None
    with pytest.raises(DataError, match="has no label"):
        read(opened(tmp_path, row, "labels"))


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        (
            {"problem": "1 + 1?", "answer": "2"},
            {},
            "holds a prompt .problem. and a ground truth .answer., but no",
        ),
        ({"text": "2"}, {}, "no column of messages or answers; columns found: text"),
        ({"dialogs": TURNS}, {"messages_key": "dialog"}, r"data.messages_key=dialog \(did you mean 'dialogs'"),
        ({"messages": TURNS}, {"row_format": "alpaca"}, "not of row format alpaca"),
        ({"messages": TURNS}, {"prompt_key": "problem"}, "set data.prompt_key=prompt data.answer_key=answer"),
        ({"messages": TURNS}, {"row_format": "gsm8k"}, "there is no row format 'gsm8k'; there are pairs, "),
    ],
)
def test_rows_without_the_columns_are_refused_by_source(
    tmp_path: Path, row: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"^data.train_files=.*rows.jsonl: .*{message}"):
        opened(tmp_path, row, **data)


def test_pictures_in_another_folder_are_found_for_conversations_too(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    row = {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": ["a.png"]}
    with pytest.raises(DataError, match=r"set data.image_dir="):
        opened(tmp_path, row, image_dir=str(Path(__file__).parent))


def test_unknown_columns_and_tags_are_refused() -> None:
    for section in ("columns", "tags"):
        with pytest.raises(ValidationError, match="Extra inputs"):
            DataConfig.model_validate({section: {"nonsense": "x"}})
