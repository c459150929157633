"""Runs as `r1 view` finds them: a log, a record of samples, pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
PICTURE = "0123456789abcdef0123456789abcdef.png"


def write_log(run: Path, steps: int, offset: float = 0.0) -> None:
    run.mkdir(parents=True, exist_ok=True)
    rows = [{"step": s, "reward/overall": offset + 1 - 1 / s, "actor/grad_norm": 2.0 / s} for s in range(1, steps + 1)]
    (run / "experiment_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_samples(run: Path, step: int, groups: int = 3, each: int = 4, phase: str = "train") -> None:
    """Write a step of the record. Group 0 has no variance, its first answer failed; the last of each is cut off."""
    count = groups * each
    group, sample = np.repeat(np.arange(groups), each), np.tile(np.arange(each), groups)
    tokens = [list(range(10 + one % 5)) for one in range(count)]
    noise = [[0.1 * (t - 5) for t in row] for row in tokens]
    columns: dict[str, Any] = {
        "step": pa.array([step] * count, pa.int32()),
        "phase": [phase] * count,
        "group": pa.array(group, pa.int32()),
        "sample": pa.array(sample, pa.int32()),
        "prompt_id": [f"rows.jsonl:{one}" for one in group],
        "prompt": [f"What is {one} plus {one}? {HOSTILE}" for one in group],
        "answer": [f"It is {one}, says {number}. {HOSTILE}" for number, one in enumerate(group)],
        "ground_truth": [str(one) for one in group],
        "media": [[PICTURE] for _ in group],
        "tokens": pa.array(tokens, pa.list_(pa.int32())),
        "rollout_logprobs": pa.array(noise, pa.list_(pa.float32())),
        "old_logprobs": pa.array(noise, pa.list_(pa.float32())),
        "entropies": pa.array(noise, pa.list_(pa.float32())),
        "advantages": pa.array(noise, pa.list_(pa.float32())),
        "score": np.where(group == 0, 0.0, np.where((group == 2) & (sample == 1), np.nan, sample)),
        "reward": [float(one) for one in sample],
        "parts": pa.array([[("accuracy", 1.0), (HOSTILE, 0.5)]] * count, pa.map_(pa.string(), pa.float64())),
        "extracted": [str(one) for one in group],
        "reason": [""] * count,
        "failure": ["timeout: 3 s" if number == 0 else None for number in range(count)],
        "finish_reason": ["length" if one == each - 1 else "stop" for one in sample],
        "weight_version": pa.array([step] * count, pa.int32()),
    }  # fmt: skip
    (run / "samples").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), run / "samples" / f"{step:09}-{phase}.parquet", compression="zstd")


def write_tokenizer(run: Path) -> None:
    """Write a checkpoint's tokenizer, whose token 3 is a script and 4 an end of line."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"word{number} ": number for number in range(14) if number not in (3, 4)} | {HOSTILE: 3, "\n": 4, "?": 14}
    folder = run / "global_step_2" / "actor"
    folder.mkdir(parents=True)
    Tokenizer(WordLevel(words, unk_token="?")).save(str(folder / "tokenizer.json"))


def write_run(run: Path, steps: int = 3, offset: float = 0.0) -> Path:
    from PIL import Image

    write_log(run, steps, offset)
    for step in range(1, steps + 1):
        write_samples(run, step)
    (run / "media").mkdir()
    Image.new("RGB", (64, 48), "teal").save(run / "media" / PICTURE)
    return run
