"""The columns of the record: one row for each answer, and one for each fork of an episode."""

import os
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class Column(NamedTuple):
    name: str
    type: pa.DataType
    meaning: str


TOKENS, NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())

CALL = pa.struct(
    [
        ("tool", pa.string()),
        ("arguments", pa.string()),  # JSON
        ("seconds", pa.float32()),
        ("error", pa.string()),
        ("truncated", pa.int32()),  # characters left out of the result
        ("cause", pa.string()),  # of the error: `timeout`, `crash`, `exception`, `malformed`, `limit`, …
    ]
)
TURN = pa.struct(
    [
        ("role", pa.string()),  # `assistant` or `environment`
        ("begin", pa.int32()),  # of its tokens, among `tokens`
        ("end", pa.int32()),
        ("messages", pa.string()),  # JSON, OpenAI style; pictures as {"type": "image"}, in the order of `media`
        ("calls", pa.list_(CALL)),  # that the environment executed, or refused
        ("reward", pa.float64()),  # of an assistant's turn, from the environment
    ]
)

COLUMNS = (
    Column("step", pa.int32(), "of training, or of the weights of a validation; the block of rows of `r1 sample`"),
    Column("phase", pa.string(), "`train`, `validation`, `sample` of `r1 sample`, `sft` of `r1 sft`"),
    Column("group", pa.int32(), "the prompt's place in the step"),
    Column("sample", pa.int32(), "the answer's place in its group"),
    Column("prompt_id", pa.string(), "the row: file and number; the noise of its answers is a function of it"),
    Column("source", pa.string(), "the data source that results are reported under"),
    Column("prompt", pa.string(), "as rendered for the model"),
    Column("answer", pa.string(), "as decoded for the reward"),
    Column("ground_truth", pa.string(), "as the row has it"),
    Column(
        "media",
        pa.list_(pa.string()),
        "files in `media/`, in order, as the model saw them; an episode's come last",
    ),
    Column("prompt_tokens", TOKENS, "token ids, pictures as their placeholders"),
    Column("tokens", TOKENS, "token ids of the answer; all are trained on, or those of `sampled`"),
    Column("rollout_logprobs", NUMBERS, "of each token, as the engine sampled it, at the sampling temperature"),
    Column("old_logprobs", NUMBERS, "of each token, the learner's before its update; null in validation"),
    Column("entropies", NUMBERS, "of each token's distribution, nats, the learner's before its update; likewise"),
    Column("ref_logprobs", NUMBERS, "of each token, the reference's; null without one"),
    Column("teacher_logprobs", NUMBERS, "of each token, the teacher's; NaN: it gave none; null without one"),
    Column("teacher_top", pa.list_(NUMBERS), "of each token, log-probs of the teacher's most likely ones; with `topk`"),
    Column("teacher_top_ids", pa.list_(TOKENS), "these tokens; -1: none"),
    Column("advantages", NUMBERS, "of each token; null in validation"),
    Column("score", pa.float64(), "what the reward gave"),
    Column("reward", pa.float64(), "what the estimator saw: the score after shaping"),
    Column("parts", pa.map_(pa.string(), pa.float64()), "the parts of the score by name"),
    Column("extracted", pa.string(), "the final answer that the reward read, if it tells"),
    Column("reason", pa.string(), "why it got its score, if the reward tells"),
    Column("failure", pa.string(), "why it could not be scored; null if it was"),
    Column("finish_reason", pa.string(), "`stop`, or `length` where it was cut off"),
    Column("weight_version", pa.int32(), "of the weights that sampled it"),
    Column("sampled", pa.list_(pa.bool_()), "of an episode: which `tokens` the policy chose; null: all"),
    Column("turns", pa.list_(TURN), "of an episode: its turns, with calls and rewards; null for single answers"),
    Column("stop_reason", pa.string(), "of an episode: why it ended, `forked` for its forks; null for single answers"),
    Column(
        "episode",
        pa.int32(),
        "of an episode with forks: its number in the step, which its rows share, the main path last; else null",
    ),
)

SCHEMA = pa.schema([(column.name, column.type) for column in COLUMNS])

# Columns of few values, or of values that come once an answer of a group; tokens compress better as they are.
REPEATED = ["phase", "prompt_id", "source", "prompt", "ground_truth", "finish_reason", "key"]


def write_table(table: pa.Table, path: Path) -> None:
    """Write a file of the record beside `path`, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".draft_{path.name}")
    repeated = [name for name in REPEATED if name in table.column_names]
    pq.write_table(table, draft, compression="zstd", use_dictionary=repeated)
    os.replace(draft, path)
