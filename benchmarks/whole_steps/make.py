"""The files of a task.

Text is a Qwen2 of random weights (`tiny` or `small` of `rollout_prompts.py`) with the quickstart's tokenizer, and
prompts of 32 to 96 tokens; the reward is the share of vowels. Pictures are the quickstart's model, rows and reward,
whose answers end by themselves.
"""

import json
import random
from pathlib import Path
from typing import Any

from rollout import make_lengths
from rollout_prompts import make_model
from transformers import AutoTokenizer

from whole_steps.task import QUICKSTART, Task

ROWS = 256
REWARD = '''"""The share of an answer's characters that are vowels."""

REWARD_NAME = "vowels"
REWARD_TYPE = "batch"


def compute_score(reward_inputs):
    texts = [item["response"] for item in reward_inputs]
    return [{"overall": sum(letter in "aeiou" for letter in text) / max(len(text), 1)} for text in texts]
'''


def make_task(kind: str, size: str, prompts: int, tokens: int, folder: Path) -> Task:
    """Write the files of a task into `folder`."""
    if kind == "pictures":
        found = (str(QUICKSTART / name) for name in ("model", "train.parquet", "reward.py"))
        return Task(kind, *found, prompts=prompts, tokens=20, prompt_tokens=64, rate=1e-4, lengths=None)
    write_model(folder / "model", size)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    draw = random.Random(1)
    rows = [make_prompt(draw, tokenizer) for _ in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"problem": row, "answer": "0"}) + "\n" for row in rows))
    (folder / "vowels.py").write_text(REWARD)
    found = (str(folder / name) for name in ("model", "rows.jsonl", "vowels.py"))
    lengths = make_lengths(kind, tokens, prompts)
    return Task(kind, *found, prompts=prompts, tokens=tokens, prompt_tokens=128, rate=1e-5, lengths=lengths)


def make_prompt(draw: random.Random, tokenizer: Any) -> str:
    """Words of random letters, 32 to 96 tokens with what the chat template adds."""
    wanted, text = draw.randint(32, 96) - 10, ""
    while len(tokenizer(text)["input_ids"]) < wanted:
        text += " " + "".join(draw.choice("abcdefghijklmnoprstu") for _ in range(draw.randint(2, 7)))
    return text.strip()


def write_model(folder: Path, size: str) -> None:
    """Write a text model of random weights in float32, with the quickstart's tokenizer."""
    model = make_model(size)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    tokenizer.save_pretrained(folder)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)
