"""Makes the logs under `runs/` by real runs of the quickstart.

`uv run python packages/r1-cli/tests/make_runs.py [NAME…]`. Each is some tens of steps on the first rows; of a step the
numbers are kept that a diagnosis reads. Those that no short run of the quickstart shows are made by hand in
`test_cli_diagnose.py`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from r1_cli.runs.diagnose.answers import COLUMNS, STEPS
from r1_cli.runs.reader import SAMPLES, RunReader, sample_file

REWARD = "worker.reward.reward_function=packages/r1-cli/tests/bad_rewards.py:"
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BASE = [
    "examples/quickstart/config.yaml", "data.train_files=examples/quickstart/train.parquet[:512]",
    "data.val_files=null",
    "trainer.val_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.logger=[file]",
    "worker.actor.micro_batch_size_per_device_for_update=32", "trainer.max_idle_steps=-1",
    "worker.actor.micro_batch_size_per_device_for_experience=64",
]  # fmt: skip
BAD = {
    "rate_too_high": ["worker.actor.optim.lr=0.02", "trainer.max_steps=30"],
    "rate_too_low": ["worker.actor.optim.lr=1e-9", "trainer.max_steps=30"],
    "truncation": ["data.max_response_length=8", "trainer.max_steps=16"],
    "failing_rewards": [REWARD + "fails", "trainer.max_steps=16"],
    "slow_rewards": [REWARD + "sleeps", "trainer.max_steps=10"],
    "no_variance": [REWARD + "constant", "trainer.max_steps=16"],
    "part_falls": [REWARD + "wordy", "worker.actor.optim.lr=1e-3", "trainer.max_steps=40"],
    "kl_runaway": [
        "worker.actor.optim.lr=3e-3",
        "algorithm.disable_kl=false", "algorithm.use_kl_loss=true", "algorithm.kl_coef=0.0", "trainer.max_steps=40",
    ],
    "format_gamed": [REWARD + "wordy", "worker.actor.optim.lr=1e-3", "trainer.max_steps=60"],
    "dead_media": [REWARD + "three", "worker.actor.optim.lr=1e-3", "trainer.max_steps=60", "trainer.record_gb=1"],
    "length_explosion": [
        REWARD + "longer", "data.max_response_length=96", "worker.actor.optim.lr=1e-3", "trainer.max_steps=60",
    ],
    "skipped_steps": [REWARD + "huge", "algorithm.adv_estimator=dr_grpo", "trainer.max_steps=10"],
    "validation_below": [
        "data.train_files=examples/quickstart/train.parquet[:8]", "data.rollout_batch_size=8",
        "worker.actor.global_batch_size=8", "worker.actor.optim.lr=1e-3", "trainer.max_steps=60",
        "data.val_files=examples/quickstart/val.parquet[:128]", "trainer.val_freq=15", "trainer.val_before_train=true",
    ],
    "stale_samples": ["trainer.max_staleness=4", "trainer.max_steps=20"],
}  # fmt: skip
RECORDED = ("dead_media", "healthy_01")
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "opo")
VALIDATED = [
    "data.val_files=examples/quickstart/val.parquet[:128]", "trainer.val_freq=10", "trainer.val_before_train=true",
]  # fmt: skip
HEALTHY = {
    f"healthy_{seed:02}": [
        *VALIDATED,
        f"data.seed={seed}", f"worker.rollout.seed={seed}", "trainer.max_steps=30",
        f"algorithm.adv_estimator={ESTIMATORS[seed % 5]}", f"worker.actor.optim.lr={(1e-4, 2e-4)[seed % 2]}",
    ]
    for seed in range(1, 21)
}  # fmt: skip
KEPT = (
    "step", "reward/", "response_length/", "prompt_length/m", "actor/", "rollout/logprob_gap_mean", "staleness/mean",
    "timing_s/reward", "timing_s/step", "critic/advantages/m", "val/reward_score",
)  # fmt: skip


def main(names: list[str]) -> None:
    """Make those that are named, or all."""
    for name, words in (BAD | HEALTHY).items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [
                str(Path(sys.executable).parent / "r1"),
                "train",
                *BASE,
                *words,
                f"trainer.save_checkpoint_path={folder}",
            ]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            lines = (Path(folder) / "experiment_log.jsonl").read_text().splitlines()
            config = json.loads((Path(folder) / "experiment_config.json").read_text())
            target = HERE / "runs" / name
            target.mkdir(parents=True, exist_ok=True)
            if name in RECORDED:
                keep_record(Path(folder), target)
        with (target / "experiment_log.jsonl").open("w") as file:
            for line in lines:
                kept = {k: short(v) for k, v in json.loads(line).items() if k.startswith(KEPT)}
                file.write(json.dumps(kept, separators=(",", ":")) + "\n")
        packed = {"worker": {"actor": {"padding_free": config["worker"]["actor"]["padding_free"]}}}
        (target / "experiment_config.json").write_text(json.dumps(packed) + "\n")
        print(name, len(lines), "steps")


def keep_record(run: Path, target: Path) -> None:
    """Keep of the record what a diagnosis reads."""
    (target / SAMPLES).mkdir(exist_ok=True)
    for step in RunReader(run).recorded_steps()[-STEPS:]:
        pq.write_table(
            RunReader(run).sample_table(step, columns=COLUMNS), target / SAMPLES / sample_file(step, "train")
        )


def short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


if __name__ == "__main__":
    main(sys.argv[1:])
