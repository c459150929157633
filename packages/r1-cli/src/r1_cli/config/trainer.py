"""Configuration section `trainer`: length, devices, frequencies, loggers, checkpoints."""

import os
from collections.abc import Iterator
from os.path import isdir
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated

from pydantic import Field

from r1_cli.config.files import PASSWORD, has_password, is_url, where_or_near
from r1_cli.config.problems import KeyProblem, KeyRemark, Provenance
from r1_cli.config.rollout import RolloutConfig, engine_module
from r1_cli.config.section import AtLeastMinusOne, Count, OneOrMore, Positive, Section, UserPath, one_of
from r1_rewards.services.serve import require_token
from r1_rewards.types import RewardSpecError

# The console, the run's own files, and a service for each module in `track/loggers/`.
LOGGERS = (
    "console",
    "file",
    *(found.name for found in iter_modules([str(Path(__file__).parents[1] / "runs/track/loggers")])),
)

METRICS_TOKEN = "R1_METRICS_TOKEN"

Logger = Annotated[str, one_of(LOGGERS)]


def _file_and_wandb() -> list[str]:
    return ["file", "wandb"]


class TrainerConfig(Section):
    """Frequencies and limits are training steps; -1 means never, or no limit."""

    total_epochs: Count = 15  # passes over the training rows
    max_steps: Count | None = None  # wins over total_epochs
    project_name: str = "easy_r1"  # in trackers and the run's folder
    experiment_name: str = "demo"  # likewise
    logger: Annotated[list[Logger], OneOrMore, Field(min_length=1)] = Field(default_factory=_file_and_wandb)
    nnodes: Count = 1  # machines
    min_nodes: Count | None = None  # the fewest machines to go on with if one is lost; null: all of nnodes
    n_gpus_per_node: Count = 8  # devices of each; CPU processes without a GPU
    max_try_make_batch: int = 20  # sampling rounds to fill a batch; -1: no limit
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    val_freq: AtLeastMinusOne = 5
    val_before_train: bool = True  # once before the first step
    val_only: bool = False  # validate and stop
    val_generations_to_log: Annotated[int, Field(ge=0)] = 3  # prompts of a validation in generations.jsonl
    train_generations_to_log: Annotated[int, Field(ge=0)] = 1  # prompts of a step in generations.jsonl
    record_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0  # largest RUN/samples and RUN/media; 0: none
    max_idle_steps: AtLeastMinusOne = 10  # stop after this many steps in a row without signal
    max_skipped_steps: AtLeastMinusOne = 10  # stop after this many in a row whose loss or gradient was not finite
    save_freq: AtLeastMinusOne = 5
    max_failed_saves: Count = 5  # checkpoints in a row that could not be written, after which a run ends
    save_limit: AtLeastMinusOne = 3  # newest checkpoints to keep; -1 or 0: all
    memory_save_freq: AtLeastMinusOne = -1  # steps between copies in /dev/shm, which outlive processes and a lost node
    save_model_only: bool = False  # without the optimizer's states
    save_checkpoint_path: UserPath | None = None  # null: checkpoints/PROJECT/EXPERIMENT
    load_checkpoint_path: UserPath | None = None  # a global_step_N to resume from, or its URL
    upload_path: str | None = None  # a URL for fsspec (s3://, gs://, hf://) to copy checkpoints to, and to resume from
    find_last_checkpoint: bool = True  # resume from the run's newest checkpoint
    stop_seconds: Positive | None = 30.0  # from SIGTERM or SIGUSR1 to the end of the process; null: no limit
    collective_timeout: Positive = 1800.0  # seconds that a rank waits for others, with several devices
    phase_timeout: Positive = 7200.0  # seconds for a phase of a step; 10 times its slowest so far, if that is less
    max_restarts: Annotated[int, Field(ge=0)] = 3  # by itself, after a fault of a process, within restart_window
    restart_window: Positive = 3600.0  # seconds
    max_staleness: Annotated[int, Field(ge=0)] = 0  # steps that sampling runs ahead of learning; 0: synchronous
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None  # for Prometheus; 0: any free; null: none
    metrics_host: str = "127.0.0.1"  # address of metrics_port; any but loopback needs R1_METRICS_TOKEN
    timeline: Annotated[int, Field(ge=0)] = 0  # first steps to record in RUN/timeline.json
    ray_timeline: UserPath | None = None  # a file for Ray's timeline, with several devices

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.save_checkpoint_path or Path("checkpoints") / self.project_name / self.experiment_name)

    @property
    def devices(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    def file_problems(self, *, saves: bool) -> Iterator[KeyProblem]:
        resumed = self.load_checkpoint_path
        if resumed and not is_url(resumed) and not os.path.isdir(resumed):
            yield "trainer.load_checkpoint_path", f"no such folder{where_or_near(resumed)}"
        if not saves:
            return
        folder, key = self.checkpoint_folder, "trainer.save_checkpoint_path"
        there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
        if not isdir(there):
            yield key, f"{folder} cannot be made: {there} is a file"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield key, f"{folder} cannot be written: you may not write to {there}"

    def problems(self, *, validates: bool) -> Iterator[KeyProblem]:
        if self.val_only and not validates:
            yield "trainer.val_only", "needs data.val_files"
        if self.upload_path is not None and not is_url(self.upload_path):
            yield "trainer.upload_path", "is not a URL; write s3://BUCKET/FOLDER, gs://… or hf://…"
        for key, url in (("upload_path", self.upload_path), ("load_checkpoint_path", self.load_checkpoint_path)):
            if url and has_password(url):
                yield f"trainer.{key}", PASSWORD
        if self.min_nodes is not None and self.min_nodes > self.nnodes:
            yield "trainer.min_nodes", f"must be at most trainer.nnodes={self.nnodes}, or null"
        if self.max_try_make_batch == 0 or self.max_try_make_batch < -1:
            yield "trainer.max_try_make_batch", "must be at least 1, or -1 for no limit"
        if self.metrics_port is not None:
            try:
                require_token(self.metrics_host, os.environ.get(METRICS_TOKEN) or None, METRICS_TOKEN)
            except RewardSpecError as error:
                yield "trainer.metrics_host", str(error)

    def staleness_problems(
        self, rollout: RolloutConfig, provenance: Provenance, *, colocated: bool
    ) -> Iterator[KeyProblem]:
        if not self.max_staleness or not colocated:
            return
        # Without GPUs, several devices are only meant if the user sets them.
        several = self.devices > 1 and provenance.is_set("trainer.n_gpus_per_node")
        if several or self.nnodes > 1:
            yield STALENESS, OWN_DEVICES
        elif engine_module(rollout.engine) is not engine_module("embedded"):
            own = "worker.rollout.name=embedded, which gets a process of its own, worker.rollout.servers, or engines"
            yield (
                STALENESS,
                f"needs an engine beside the learner: {own} with devices of their own (worker.rollout.engines)",
            )


STALENESS = "trainer.max_staleness"
OWN_DEVICES = (
    "needs engines on devices of their own where several learn: set worker.rollout.engines.nnodes and "
    "worker.rollout.engines.n_gpus_per_node, or worker.rollout.servers; or set 0"
)
REMARKS = (
    KeyRemark("trainer.ray_timeline", "one device, no Ray", lambda v, c: not c.on_cluster),
    KeyRemark("trainer.collective_timeout", "there is one device", lambda v, c: c.trainer.devices == 1),
    KeyRemark("trainer.critic_warmup", "the estimator needs no critic", lambda v, c: not c.has_critic),
    KeyRemark("trainer.save_freq", "as -1, no checkpoint is written", lambda v, c: v == 0, only_if_set=True),
    KeyRemark("trainer.val_freq", "as -1, nothing is validated between steps", lambda v, c: v == 0, only_if_set=True),
    KeyRemark(
        "trainer.critic_warmup",
        "the actor is never updated",
        lambda v, c: c.has_critic and c.trainer.max_steps is not None and v >= c.trainer.max_steps,
        only_if_set=True,
    ),
)
