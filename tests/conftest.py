"""Fixtures: the `r1` command in this process, and one quickstart run for all tests that read it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from endtoend import QUICKSTART, R1, ROOT, SMALL

from r1_cli.main import main


@pytest.fixture(scope="session")
def r1() -> Iterator[R1]:
    """Run `r1` with these words from the repository's root; unless `ok=False` it must succeed.

    In this process, because importing torch and transformers takes longer than most of these runs.
    """

    def run(*words: str | Path, ok: bool = True) -> Result:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(main, list(map(str, words)))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert not ok or result.exit_code == 0, result.output
        return result

    before = Path.cwd()
    os.chdir(ROOT)
    yield run
    os.chdir(before)


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory, r1: R1) -> Path:
    """The folder of a short quickstart run, with what it printed in `output.txt`."""
    folder = tmp_path_factory.mktemp("quickstart")
    process = r1(
        "train", QUICKSTART, *SMALL, "trainer.max_steps=3", "trainer.val_freq=2", "trainer.save_freq=2",
        "algorithm.disable_kl=false", "trainer.timeline=2", f"trainer.save_checkpoint_path={folder}",
        "worker.actor.micro_batch_size_per_device_for_update=auto",
        "worker.actor.micro_batch_size_per_device_for_experience=auto",
    )  # fmt: skip
    (folder / "output.txt").write_text(process.output)
    return folder
