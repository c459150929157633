"""What the record of every answer costs a step of the quickstart: `benchmarks/record.py [--steps 40] [--rounds 3]`.

Runs of the quickstart with `trainer.record_gb=10` (the default) and `0` take turns; the median step of each round
counts, from one step's begin to its end with all that is logged, and the best round of each way. A round's first five
steps warm up. Wall seconds; other work on the machine blurs them.
The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5
SET = [
    "trainer.val_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.logger=[file]",
    "worker.actor.micro_batch_size_per_device_for_update=32",
    "worker.actor.micro_batch_size_per_device_for_experience=64",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    best: dict[int, float] = {}
    size = 0
    for _ in range(options.rounds):
        for gb in (10, 0):
            seconds, held = run(gb, options.steps)
            best[gb] = min(seconds, best.get(gb, seconds))
            size = max(size, held)
            print(f"record_gb={gb}: median step {seconds * 1e3:.1f} ms, record {held / 1e6:.2f} MB", flush=True)
    answers = options.steps * 16 * 8
    found = {
        "record_ratio": best[10] / best[0],
        "with_s": best[10],
        "without_s": best[0],
        "bytes_an_answer": size / answers,
    }
    print(json.dumps({"benchmark": "record"} | {name: round(value, 4) for name, value in found.items()}))


def run(gb: int, steps: int) -> tuple[float, int]:
    """Return the median seconds of a step, and the bytes that the record takes with its pictures."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["examples/quickstart/config.yaml", *SET, f"trainer.max_steps={steps}", f"trainer.record_gb={gb}"]
        words += [f"trainer.timeline={steps}"]
        command = [str(Path(sys.executable).parent / "r1"), "train", *words, f"trainer.save_checkpoint_path={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        events = json.loads((Path(folder) / "timeline.json").read_text())["traceEvents"]
        spans = [event["dur"] / 1e6 for event in events if event["name"].startswith("step ")]
        files = [path for name in ("samples", "media") for path in (Path(folder) / name).glob("*")]
        return median(spans[WARM_UP:]), sum(path.stat().st_size for path in files)


if __name__ == "__main__":
    main()
