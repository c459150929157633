"""The commands of a recipe's page, word for word, with settings that make them tiny."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
QUICKSTART = "examples/quickstart/model"
STARTS = ("r1 ", "r1-rewards ", "python ", "python3 ", "vllm ", "curl ")
TINY = [
    "trainer.nnodes=1", "trainer.n_gpus_per_node=1", "worker.rollout.tensor_parallel_size=1", "trainer.max_steps=2",
    "trainer.save_freq=2", "trainer.val_freq=-1", "trainer.val_before_train=false", "trainer.logger=[file]",
    "data.rollout_batch_size=4", "data.val_batch_size=4", "data.filter_overlong_prompts_workers=1",
    "data.max_response_length=12", "worker.actor.global_batch_size=2", "worker.rollout.n=2",
    "worker.rollout.val_override_config.n=1",
]  # fmt: skip
SHORT_TURNS = "worker.rollout.multi_turn.max_turn_tokens=8"
SMALL_PICTURES = ["data.min_pixels=784", "data.max_pixels=12544"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A page's stand-ins: the model, of `stand_ins.py` or a folder, the rows in place of the hub's, further words."""

    model: str
    rows: str = ""  # a file that `rows.py` writes; none: the page's commands make their own
    words: tuple[str, ...] = ()


RECIPES = {
    "easyr1": Recipe(QUICKSTART, "geometry.parquet", tuple(SMALL_PICTURES)),
    "geometry3k": Recipe(QUICKSTART, "geometry.parquet", tuple(SMALL_PICTURES)),
    "r1v": Recipe(QUICKSTART, "counting.parquet"),
    "r1_zero": Recipe("base", "mathematics.jsonl"),
    "deepseek_r1_distill": Recipe("distill", "mathematics.jsonl"),
    "llama3": Recipe("llama3", "words.jsonl"),
    "rlpr": Recipe(QUICKSTART),
    "lmm_r1": Recipe("qwen2_5_vl", words=tuple(SMALL_PICTURES)),
    "search_r1": Recipe(QUICKSTART, "questions.jsonl", (SHORT_TURNS,)),
    "deepeyes": Recipe(QUICKSTART, words=(*SMALL_PICTURES, SHORT_TURNS, "data.max_prompt_length=1024")),
}


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command in a page's code blocks, in order."""
    commands, open_lines = list[list[str]](), list[str]()
    for line in page.read_text("utf-8").splitlines():
        text = line[4:].removeprefix("uv run ") if line.startswith("    ") else ""
        if not open_lines and not text.startswith(STARTS):
            continue
        open_lines.append(text)
        try:
            words = shlex.split("\n".join(open_lines).replace("\\\n", ""))
        except ValueError:  # a quote that the next line closes
            continue
        if not text.endswith("\\"):
            commands.append(words)
            open_lines = []
    return commands


def stood_in(command: list[str], recipe: Recipe, model: str) -> list[str]:
    """A command of r1 with the checkpoint that there is, and behind it the words that make it tiny."""
    words = [re.sub(r"global_step_\w+", "global_step_2", word) for word in command]
    rows = [f"data.val_files={recipe.rows}[:4]"] if recipe.rows else []
    if words[1] == "eval":
        return [*words, *rows]
    if "examples/rlpr/vision.yaml" in words and not any(word.startswith("data.train_files=") for word in words):
        words = [*words, "data.train_files=examples/quickstart/train.parquet[:16]"]  # each row has a base score to find
    if words[1] not in ("train", "check") or "--dry-run" in words:
        return words
    rows += [f"data.train_files={recipe.rows}"] if recipe.rows else []
    given = dict(word.split("=", 1) for word in words if "=" in word)
    local = Path(given.get("worker.actor.model.model_path", "")).is_dir() and "worker.actor.model.model_path" in given
    return [*words, *TINY, *rows, *recipe.words, *([] if local else [f"worker.actor.model.model_path={model}"])]
