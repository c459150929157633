"""Does reinforcement learning on text alone make a model better at pictures? On the quickstart's family.

    uv run python benchmarks/text_only.py [--seeds 1 2] [--steps 100] [--temperature 1.0]

LMM-R1 (arXiv 2503.07536) finds that it does. The rows of training are the quickstart's questions with signs in place of
a picture ("Count the shapes. # @ #"), one to four of them, with the same reward; the vision tower is frozen. What is
validated on are the quickstart's pictures, none of which is ever trained on, and further rows of text. Prints a line of
JSON for each seed.
"""

import argparse
import io
import json
import os
import random
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
SIGNS = "#@%&$"
REWARD = "examples/quickstart/reward.py:compute_score"


def write_rows(path: Path, rows: int, seed: int) -> None:
    """Write rows of which each count has as many."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for number in range(rows):
            count = number % 4 + 1
            signs = " ".join(draw.choices(SIGNS, k=count))
            file.write(json.dumps({"problem": f"{draw.choice(QUESTIONS)} {signs}", "answer": str(count)}) + "\n")


def run(seed: int, steps: int, temperature: float, folder: Path) -> dict[str, object]:
    """Train on text; return accuracies by step."""
    from r1_cli.main import main as r1

    write_rows(folder / "text.jsonl", 3000, seed)
    write_rows(folder / "text_val.jsonl", 324, 100 + seed)
    sources = [
        {"files": "examples/quickstart/val.parquet", "name": "pictures", "reward_function": REWARD},
        {"files": str(folder / "text_val.jsonl"), "name": "text", "reward_function": REWARD},
    ]
    words = [
        "examples/quickstart/config.yaml", f"data.train_files={folder}/text.jsonl", "data.val_files=null",
        f"data.val_sources={json.dumps(sources)}", "worker.actor.global_batch_size=4",
        "worker.actor.model.freeze_vision_tower=true", f"trainer.max_steps={steps}", f"trainer.val_freq={steps // 2}",
        "trainer.save_freq=-1", "trainer.logger=[file]", "data.filter_overlong_prompts_workers=1",
        f"worker.rollout.val_override_config.temperature={temperature}",
        f"data.seed={seed}", f"worker.rollout.seed={seed}", f"trainer.save_checkpoint_path={folder}/run",
    ]  # fmt: skip
    with redirect_stdout(io.StringIO()):
        r1(["train", *words], standalone_mode=False)
    log = [json.loads(line) for line in (folder / "run/experiment_log.jsonl").read_text().splitlines()]
    names = {"pictures": "val/pictures/accuracy_reward", "text": "val/text/accuracy_reward"}
    curves = {short: {one["step"]: one[name] for one in log if name in one} for short, name in names.items()}
    return {"seed": seed, "steps": steps, "temperature": temperature, **curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=1.0, help="of validation; 0: greedy")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run(seed, arguments.steps, arguments.temperature, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
