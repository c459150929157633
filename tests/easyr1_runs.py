"""Every command of EasyR1's users, for two steps on two ranks, with tiny models, rows and batches in place of its own.

    uv run python tests/easyr1_runs.py [NAME]...

Left out are those that ask for what this version refuses: sequences over several devices.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from families import save_model

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = ROOT / "packages/r1-cli/tests/easyr1_commands.json"
COMMANDS: dict[str, list[str]] = json.loads(WRITTEN.read_text())["commands"]
REFUSED = ("worker.actor.ulysses_size",)
NAMES = [name for name, words in COMMANDS.items() if not any(word.startswith(REFUSED) for word in words)]
# The family of each model that the commands name, by how its path begins.
FAMILIES = {
    "Qwen/Qwen2.5-VL": "qwen2_5_vl", "Qwen/Qwen3-VL": "qwen3_vl", "Qwen/Qwen2.5": "qwen2", "Qwen/Qwen3": "qwen3",
}  # fmt: skip
ROWS = {"pictures": "examples/quickstart/{}.parquet[:64]", "text": "examples/gsm8k/sample.jsonl"}
TINY = [
    "trainer.n_gpus_per_node=2", "trainer.max_steps=2", "trainer.save_freq=2", "trainer.val_freq=2",
    "trainer.val_before_train=false", "trainer.logger=[console,file]",
    "data.rollout_batch_size=4", "worker.actor.global_batch_size=2", "data.val_batch_size=4",
    "data.max_prompt_length=1024", "data.max_response_length=16", "data.min_pixels=784", "data.max_pixels=3136",
    "data.filter_overlong_prompts_workers=1",
    "worker.rollout.name=embedded", "worker.rollout.tensor_parallel_size=1",
]  # fmt: skip


def family_of(name: str) -> str:
    """The family of the model that a command names."""
    (path,) = [word.partition("=")[2] for word in COMMANDS[name] if word.startswith("worker.actor.model.model_path=")]
    return next(family for start, family in FAMILIES.items() if path.startswith(start))


def words_of(name: str, model: str, folder: Path) -> list[str]:
    """A command's words, and those that make it tiny."""
    kind = "pictures" if family_of(name).endswith("_vl") else "text"
    words = [*COMMANDS[name], *TINY, f"worker.actor.model.model_path={model}", f"trainer.save_checkpoint_path={folder}"]
    words += [f"data.train_files={ROWS[kind].format('train')}", f"data.val_files={ROWS[kind].format('val')}"]
    if kind == "text":
        words += ["data.prompt_key=question"]
    if any(word.startswith("data.mini_rollout_batch_size=") for word in words):
        words += ["data.mini_rollout_batch_size=2"]
    if "algorithm.online_filtering=True" in words:  # random weights are never right, and no group would be kept
        words += ["algorithm.filter_low=-0.01"]
    return words


def main(names: list[str]) -> int:
    failed = []
    with tempfile.TemporaryDirectory() as made:
        models = {family: save_model(family, Path(made) / family) for family in set(map(family_of, names))}
        for name in names:
            words = words_of(name, models[family_of(name)], Path(made) / "runs" / name)
            command = [str(Path(sys.executable).with_name("r1")), "train", *words]
            process = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
            print("ok    " if process.returncode == 0 else "FAILED", name, flush=True)
            if process.returncode:
                failed.append(name)
                print(process.stdout[-2000:], process.stderr[-4000:], flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or NAMES))
