"""Faulty rows of fine-tuning: named, left out and counted; too many of them end the run; a loss that is not finite."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faults_table import note_fault
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from r1_cli.build.demonstrations import build_conversation_renderer, build_demonstrations
from r1_cli.build.rows import open_sources
from r1_cli.config import load_config
from r1_cli.config.sources import training_sources
from r1_cli.models.attention import attend_packed
from r1_cli.train.demonstrations import DemonstrationBatch, DemonstrationReader, find_not_finite, to_sample
from r1_core import Batching, Learner, MicroLimit, Objective, build_optimizer
from r1_core.losses import NLL
from r1_data.dataset import Mixture
from r1_data.render import Renderer
from r1_data.types import DataError, Demonstration

MODEL = Path(__file__).resolve().parents[3] / "examples/quickstart/model"


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def build(folder: Path, rows: list[dict[str, Any]], *settings: str) -> Mixture:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data.train_files={path}", f"worker.actor.model.model_path={MODEL}", "sft.loss=nll"]
    config, _ = load_config([*words, "data.max_length=60", "data.cache_dir=null", *settings], command="sft")
    renderer = build_conversation_renderer(
        config, Renderer(AutoTokenizer.from_pretrained(MODEL), chat_template=config.data.override_chat_template)
    )
    opened = open_sources(training_sources(config.data), config.sft.wanted)
    return build_demonstrations(config, opened, renderer, None, lambda name: lambda done, total: None)


@pytest.mark.parametrize(
    ("truncation", "message", "kept"),
    [
        ("right", "2 of 5 rows are over data.max_length=60 tokens and are cut: the last answer of each loses its", 5),
        ("drop", "2 of 5 rows are over data.max_length=60 tokens and are left out", 3),
    ],
)
def test_rows_that_are_too_long_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, truncation: str, message: str, kept: int
) -> None:
    rows = [talk(f"{n} + 1?", "2 " * (90 if n in (1, 3) else 1)) for n in range(5)]
    with caplog.at_level(logging.WARNING):
        assert len(build(tmp_path, rows, f"data.truncation={truncation}")) == kept
    assert message in caplog.text
    with pytest.raises(DataError, match=r"2 of 5 rows are over data.max_length=60 tokens \(the longest has \d+"):
        build(tmp_path, rows, "data.truncation=error")


def test_faulty_rows_are_left_out_and_more_than_five_percent_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [talk(f"{n} + 1?", "2") for n in range(19)]
    faults = [{"messages": []}, {"messages": [{"role": "user", "content": "1 + 1?"}]}]
    with caplog.at_level(logging.WARNING):
        assert len(build(tmp_path, [*good, faults[0]])) == 19  # 5 %
    assert "1 of 20 rows cannot be used: rows.jsonl:20: " in caplog.text
    assert "they are left out" in caplog.text
    with pytest.raises(DataError, match=r"(?s)2 of 21 rows cannot be used: rows.jsonl:20: .*rows.jsonl:21: .*than 5%"):
        build(tmp_path, [*good, *faults])
    silent = "data.override_chat_template={% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(DataError, match=r"(?s)is empty: 19 of 19 rows cannot be used:.*override_chat_template"):
        build(tmp_path, good, silent)


class Rows(list[Demonstration]):
    """Forty rows, of which some cannot be rendered any more."""

    broken = frozenset[int]()

    def __getitem__(self, index: Any) -> Any:
        if index in self.broken:
            raise DataError(f"rows.jsonl:{index + 1}: the picture is gone")
        return [super().__getitem__(index)]

    def prefetch(self, indices: Sequence[int]) -> None: ...


def demonstration(number: int, tokens: Sequence[int] = (5, 6, 7, 8)) -> Demonstration:
    mask = [index > 0 for index in range(len(tokens))]
    return Demonstration(f"rows.jsonl:{number + 1}", [*tokens], mask, torch.arange(len(tokens))[None], {}, 1, "", None)


def test_rows_that_stop_being_readable_are_left_out_once_each_up_to_five_percent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = Rows([demonstration(number) for number in range(40)])
    rows.broken = frozenset({3, 7})
    reader = DemonstrationReader(rows)
    for _ in range(3):  # epochs: the same two rows
        batch = reader.read(range(10))
        assert (batch.left_out, len(batch.samples)) == (2, 8)
    assert "left out of this step: rows.jsonl:4: the picture is gone" in caplog.text
    rows.broken = frozenset({3, 7, 20})
    with pytest.raises(DataError, match=r"^3 of 40 rows cannot be read, more than 5%: run r1 data check; .*jsonl:21: "):
        reader.read(range(10, 30))
    note_fault("rows of `r1 sft` that cannot be read any more", outcome="goes on")


def test_one_row_whose_loss_is_not_finite_is_named_and_changes_no_weight() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[15] = float("nan")
    attend_packed(model)
    limit = MicroLimit(tokens=64)
    learner = Learner(
        model,
        build_optimizer(model.named_parameters(), lr=0.1),
        lambda step: 1.0,
        batching=Batching(True, limit, limit),
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ones = [demonstration(0), demonstration(1, (5, 15, 7, 8)), demonstration(2, (9, 6, 7))]
    samples, _ = learner.forward_backward_on_policy([to_sample(one, i) for i, one in enumerate(ones)], Objective(NLL()))
    learner.optim_step()
    assert find_not_finite(DemonstrationBatch(ones, samples)) == ["rows.jsonl:2"]
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.nan_to_num(7.0), old.nan_to_num(7.0))
