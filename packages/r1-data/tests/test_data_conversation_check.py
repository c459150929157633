"""Tests of the check of fine-tuning rows: every row has its result, in one process or in workers."""

import pytest
from data_targets import CrashingConversations

from r1_data.conversations import ConversationReader
from r1_data.conversations.check import ConversationInspector, ConversationSource, examine_conversations
from r1_data.demonstrations import ConversationRenderer
from r1_data.render import Renderer
from r1_data.types import DataError
from r1_data.workers import Workers


class Rows(list):
    """Rows, of which some cannot be read."""

    def __getitem__(self, index):
        if super().__getitem__(index) is None:
            raise DataError(f"rows.jsonl:{index + 1}: not a JSON row")
        return f"rows.jsonl:{index + 1}", super().__getitem__(index)


def talk(answer, *pictures):
    question = [*({"type": "image"} for _ in pictures), {"type": "text", "text": "How many?"}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [*pictures]}


def examine(rows, inspector, workers=None):
    source = ConversationSource("data.train_files=rows.jsonl", Rows(rows), ConversationReader())
    return list(examine_conversations([source, source], inspector, workers))


@pytest.fixture
def rows(picture):
    damaged = bytearray(picture(300, 300))
    damaged[len(damaged) // 2] ^= 0xFF  # header and end are whole
    rows = [talk(str(number), picture(60, 60 + number)) for number in range(6)]
    return [*rows, None, talk("3", bytes(damaged)), talk("3", b"no picture"), talk(""), {"messages": []}, talk("4")]


def test_each_conversation_has_its_result_in_order(processor, rows):
    inspector = ConversationInspector(ConversationRenderer(Renderer(processor)))
    alone = examine(rows, inspector)
    kinds = [""] * 6 + ["unreadable", "damage", "media", "no answer", "no answer", ""]
    assert [(row.source, row.index, row.kind) for row in alone] == [
        (source, index, kind) for source in (0, 1) for index, kind in enumerate(kinds)
    ]
    assert all(f"rows.jsonl:{row.index + 1}" in row.reason for row in alone if row.kind)


@pytest.mark.slow
def test_workers_find_the_same_conversations_as_one_process(processor, rows, monkeypatch):
    monkeypatch.setattr("r1_data.conversations.check.MANY_TEXTS", 1)
    inspector = ConversationInspector(ConversationRenderer(Renderer(processor)))
    with Workers(inspector, 1) as workers:
        assert examine(rows, inspector, workers) == examine(rows, inspector)


@pytest.mark.slow
def test_a_conversation_whose_media_kill_a_worker_is_named_and_the_rest_goes_on(processor, picture):
    renderer = ConversationRenderer(Renderer(processor))
    rows = [talk(answer, picture(60, 60)) for answer in ("1", "2", "crash", "4", "5")]
    with Workers(CrashingConversations(renderer), 1) as workers:
        found = examine(rows, ConversationInspector(renderer), workers)
    assert [row.kind for row in found] == ["", "", "crash", "", ""] * 2
    assert found[2].reason.startswith("rows.jsonl:3: its worker process ended by itself (exit code 7)")
