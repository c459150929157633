"""Configuration section `trainer`: how long, where, how often, and who is told."""

from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated

from pydantic import Field

from r1_cli.config.section import AtLeastMinusOne, Count, OneOrMore, Positive, Section, one_of

# The console, the run's own files, and a service for each module in `track/loggers/`.
LOGGERS = (
    "console",
    "file",
    *(found.name for found in iter_modules([str(Path(__file__).parents[1] / "runs/track/loggers")])),
)


Logger = Annotated[str, one_of(LOGGERS)]


def _file_and_wandb() -> list[str]:
    return ["file", "wandb"]


class TrainerConfig(Section):
    """Frequencies and limits are training steps; -1 means never, or no limit."""

    total_epochs: Count = 15  # passes over the training rows
    max_steps: Count | None = None  # wins over total_epochs
    project_name: str = "easy_r1"  # for trackers, and of the run's folder
    experiment_name: str = "demo"  # the same
    logger: Annotated[list[Logger], OneOrMore, Field(min_length=1)] = Field(default_factory=_file_and_wandb)
    nnodes: Count = 1  # machines
    n_gpus_per_node: Count = 8  # devices of each; processors where there is no GPU
    max_try_make_batch: int = 20  # batches generated to fill one; -1: no limit
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    val_freq: AtLeastMinusOne = 5
    val_before_train: bool = True  # once before the first step
    val_only: bool = False  # and then no step
    val_generations_to_log: Annotated[int, Field(ge=0)] = 3  # prompts a validation, in generations.jsonl
    train_generations_to_log: Annotated[int, Field(ge=0)] = 1  # prompts a step
    record_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0  # of RUN/samples and RUN/media; 0: none
    max_idle_steps: AtLeastMinusOne = 10  # steps in a row with nothing to learn from, after which a run ends
    save_freq: AtLeastMinusOne = 5
    save_limit: AtLeastMinusOne = 3  # newest checkpoints kept; -1 or 0: all
    save_model_only: bool = False  # without the optimizer's states
    save_checkpoint_path: str | None = None  # null: checkpoints/PROJECT/EXPERIMENT
    load_checkpoint_path: str | None = None  # a global_step_N to go on from
    find_last_checkpoint: bool = True  # the same command, run again, resumes
    collective_timeout: Positive = 1800.0  # seconds that a rank waits for the others, with several devices
    max_staleness: Annotated[int, Field(ge=0)] = 0  # steps by which sampling runs ahead of learning; 0: they take turns
    timeline: Annotated[int, Field(ge=0)] = 0  # first steps of which RUN/timeline.json shows what was done when
    ray_timeline: str | None = None  # a file for what ranks did when, with several devices

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.save_checkpoint_path or Path("checkpoints") / self.project_name / self.experiment_name)

    @property
    def devices(self) -> int:
        return self.nnodes * self.n_gpus_per_node
