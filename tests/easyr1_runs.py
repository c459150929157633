"""Every EasyR1 command for two steps on two ranks, with tiny models, rows and batches.

uv run python tests/easyr1_runs.py [NAME]...
"""

import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from families import save_model

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = ROOT / "packages/r1-cli/tests/easyr1_commands.json"
COMMANDS: dict[str, list[str]] = json.loads(WRITTEN.read_text())["commands"]
# Models in place of those that the commands name, by how the path begins: the quickstart's, which can do a little of
# what its rows ask for, and tiny random ones of the other families.
QUICKSTART = "examples/quickstart/model"
MODEL = "worker.actor.model.model_path"
MODELS = {
    "Qwen/Qwen2.5-VL": QUICKSTART, "Qwen/Qwen3-VL-30B-A3B": "qwen3_vl_moe", "Qwen/Qwen3-VL": "qwen3_vl",
    "Qwen/Qwen2.5": "qwen2", "Qwen/Qwen3": "qwen3",
}  # fmt: skip
ROWS = {
    "pictures": ["data.train_files=examples/quickstart/train.parquet[:64]",
                 "data.val_files=examples/quickstart/val.parquet[:8]"],
    "text": ["data.train_files=examples/gsm8k/sample.jsonl", "data.val_files=examples/gsm8k/sample.jsonl[:8]",
             "data.prompt_key=question"],
}  # fmt: skip
TINY = [
    "trainer.n_gpus_per_node=2", "trainer.max_steps=2",
    "data.rollout_batch_size=4", "worker.actor.global_batch_size=2", "data.val_batch_size=4",
    "data.max_response_length=16", "data.min_pixels=784", "data.max_pixels=12544",
]  # fmt: skip


def model_of(name: str) -> str:
    """What a command's model is replaced by: a folder, or a family of `families.py`."""
    (path,) = [word.partition("=")[2] for word in COMMANDS[name] if word.startswith(f"{MODEL}=")]
    return next(model for start, model in MODELS.items() if path.startswith(start))


def learners() -> list[str]:
    """The commands whose learners differ: of several that differ in rows, reward or tracker alone, the first."""
    of_learners = ("algorithm.", "worker.actor.", "worker.ref.", "worker.rollout.n=")
    seen: dict[tuple[str, ...], str] = {}
    for name, words in COMMANDS.items():
        own = [word for word in words if word.startswith(of_learners) and not word.startswith(f"{MODEL}=")]
        seen.setdefault((model_of(name), *sorted(own)), name)
    return [*seen.values()]


def words_of(name: str, model: str, folder: Path) -> list[str]:
    """A command's words, and those that make it tiny."""
    own, found = COMMANDS[name], model_of(name)
    words = [*own, *TINY, f"{MODEL}={model}", f"trainer.save_checkpoint_path={folder}"]
    words += ROWS["pictures" if found == QUICKSTART or "_vl" in found else "text"]
    if any(word.startswith("data.mini_rollout_batch_size=") for word in own):
        words += ["data.mini_rollout_batch_size=2"]
    for key in ("worker.rollout.tensor_parallel_size", "worker.actor.ulysses_size"):
        if {f"{key}=4", f"{key}=8"} & {*own}:  # of 2 devices
            words += [f"{key}=2"]
    if "algorithm.online_filtering=True" in own and found != QUICKSTART:
        words += ["algorithm.filter_low=-0.01"]  # random weights are never right, and no group would be kept
    if "trainer.logger=[console,swanlab]" in own and not find_spec("swanlab"):
        words += ["trainer.logger=[console]"]
    return words


def main(names: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        for name in names:
            model = model_of(name)
            if model != QUICKSTART and not Path(made, model).exists():
                save_model(model, Path(made, model))
            path = model if model == QUICKSTART else str(Path(made, model))
            command = [str(Path(sys.executable).with_name("r1")), "train", *words_of(name, path, Path(made, name))]
            begun = time.monotonic()
            process = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
            print(f"{name}: exit {process.returncode}, {time.monotonic() - begun:.0f} s", flush=True)
            if process.returncode:
                failed += 1
                print(process.stdout[-2000:], process.stderr[-4000:], flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*COMMANDS]))
