"""One step of the run on few prompts with short answers, in a subprocess."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from r1_cli.plan.check.findings import Finding, Subject
from r1_cli.plan.memory import estimate

MOST = 200_000_000  # parameters of a model that is small enough
LONGEST = 300.0  # seconds


def check_step(subject: Subject) -> Iterator[Finding]:
    config, memory = subject.config, estimate(subject.config)
    if memory is None or memory.parameters > MOST or config.on_cluster or config.worker.rollout.servers.used:
        yield Finding(
            "step.not made", "note", "no step was made: the model is not here, not small, or not on one device"
        )
        return
    with TemporaryDirectory() as folder:
        words = [*subject.words, *(_small_tuning(folder) if subject.tunes else _small(subject, folder))]
        command = [sys.executable, "-m", "r1_cli.main", "sft" if subject.tunes else "train", *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            yield Finding("step.hangs", "error", f"a step of 2 prompts was not over after {LONGEST:.0f} s")
            return
        wrote = Path(folder, "experiment_log.jsonl").is_file()
    if done.returncode or not wrote:
        message = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        yield Finding("step.failed", "error", f"a step of 2 prompts ended with exit code {done.returncode}: {message}")


def _small_tuning(folder: str) -> list[str]:
    """The rows stay as they are: all are read before the first step anyhow."""
    return ["worker.actor.global_batch_size=2", "trainer.max_steps=1", *_unsaved(folder)]


def _unsaved(folder: str) -> list[str]:
    return [
        "worker.actor.micro_batch_size_per_device_for_update=1",
        "worker.actor.micro_batch_size_per_device_for_experience=1",
        "data.filter_overlong_prompts_workers=1",
        "trainer.save_freq=-1", "trainer.val_freq=-1", "trainer.val_before_train=false",
        "trainer.logger=[file]", "trainer.find_last_checkpoint=false", f"trainer.save_checkpoint_path={folder}",
    ]  # fmt: skip


def _small(subject: Subject, folder: str) -> list[str]:
    data, episodes = subject.config.data, subject.config.worker.rollout.multi_turn.enable
    longest = data.max_response_length if episodes else min(data.max_response_length, 16)
    files = data.train_files
    own = isinstance(files, str) and "[" not in files and not data.sources
    return [
        *([f"data.train_files={files}[:64]"] if own else []),
        "data.rollout_batch_size=2", "worker.actor.global_batch_size=2", "worker.rollout.n=2",
        f"data.max_response_length={longest}", "trainer.max_steps=1", *_unsaved(folder),
    ]  # fmt: skip
