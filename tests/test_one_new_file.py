"""One new file is enough: tested in a copy of the repository with the file added and nothing else changed."""

from pathlib import Path

import pytest
from one_new_file import copy_repository

pytestmark = pytest.mark.slow


def test_a_copy_imports_itself_and_takes_only_new_files(tmp_path: Path) -> None:
    copy = copy_repository(tmp_path)
    copy.add("packages/r1-core/src/r1_core/losses/mine.py", '"""A module of its own."""\n\nVALUE = 7\n')
    printed = copy.run("import r1_core.losses.mine as mine; print(mine.VALUE, mine.__file__)")
    assert printed.split() == ["7", str(copy.root / "packages/r1-core/src/r1_core/losses/mine.py")]
    with pytest.raises(FileExistsError):
        copy.add("packages/r1-core/src/r1_core/losses/ppo.py", "")
    assert "Usage" in copy.r1("--help")
    assert "1 passed" in copy.pytest("tests/test_layering.py", "-k", "every_module_has_a_docstring and r1_core")


TRACKER = '''"""Numbers as lines of text."""

from pathlib import Path
from typing import Any

from r1_cli.runs.track.types import Record, RunInfo


class Lines:
    """One line a metric."""

    def __init__(self, info: RunInfo) -> None:
        self.path: Path = info.folder / "lines.txt"

    def log(self, step: int, record: Record) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{step} {name} {value}\\\\n" for name, value in record.items())

    def log_generations(self, step: int, rows: list[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


def open_logger(info: RunInfo) -> Lines:
    """Open the file."""
    return Lines(info)
'''


def test_a_tracker_is_one_new_file(tmp_path: Path) -> None:
    copy = copy_repository(tmp_path)
    copy.add("packages/r1-cli/src/r1_cli/runs/track/loggers/lines.py", TRACKER)
    folder = tmp_path / "run"
    printed = copy.run(
        f"""
from pathlib import Path
from r1_cli.config import load_config
from r1_cli.runs.track import RunInfo, Tracker
from r1_cli.runs.track.console import ConsoleReporter
from rich.console import Console

words = ["examples/quickstart/config.yaml", "trainer.logger=[file,lines]"]
config, _ = load_config(words)
reporter = ConsoleReporter(Console(), step_lines=False)
reporter.begin(0, 3)
tracker = Tracker(config.trainer.logger, RunInfo("p", "e", Path({str(folder)!r}), {{}}, 0), reporter)
tracker.log(3, {{"reward/overall": 0.5}})
tracker.flush()
print((Path({str(folder)!r}) / "lines.txt").read_text())
"""
    )
    assert "3 reward/overall 0.5" in printed
    refused = copy.r1("train", "examples/quickstart/config.yaml", "trainer.logger=lynes", "--dry-run", ok=False)
    assert "did you mean lines?" in refused


ENGINE = '''"""Says the token 7 and ends, whatever it is asked."""

from contextlib import ExitStack, nullcontext
from typing import Any

from r1_cli.build.engines import EngineSetup

IGNORES = {"enforce_eager": "seven is always said eagerly"}


def missing() -> str | None:
    return None


def preferred() -> bool:
    return False


class Seven:
    def __init__(self, end: int) -> None:
        self.end, self.version = end, -1

    def load_weights(self, source: Any) -> None:
        self.version = source.version

    def active(self, source: Any = None) -> Any:
        self.load_weights(source)
        return nullcontext()

    def generate(self, prompts: Any, params: Any) -> Any:
        from r1_rollout.types import Completion

        group = [Completion([7, self.end], [-1.0, -1.0], "stop", self.version) for _ in range(params.n)]
        return ((index, group) for index, _ in enumerate(prompts))


def open_engine(setup: EngineSetup, stack: ExitStack) -> Seven:
    return Seven(min(setup.end_token_ids))
'''


def test_an_engine_is_one_new_file(tmp_path: Path) -> None:
    copy = copy_repository(tmp_path)
    copy.add("packages/r1-cli/src/r1_cli/build/engines/seven.py", ENGINE)
    words = [
        "train", "examples/quickstart/config.yaml", "worker.rollout.name=seven", "trainer.max_steps=2",
        "data.train_files=examples/quickstart/train.parquet[:16]", "data.filter_overlong_prompts_workers=1",
        "data.val_files=null", "data.rollout_batch_size=2", "worker.actor.global_batch_size=2", "worker.rollout.n=2",
        "worker.rollout.enforce_eager=true", f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    ]  # fmt: skip
    refused = copy.r1(*words, ok=False)
    assert "worker.rollout.canary=true: Seven has no logprobs_of" in refused
    printed = copy.r1(*words, "worker.rollout.canary=false")
    assert "seven is always said eagerly" in printed
    assert (tmp_path / "run/global_step_2").is_dir()
    assert "did you mean seven?" in copy.r1(*words, "worker.rollout.name=sevn", "--dry-run", ok=False)
