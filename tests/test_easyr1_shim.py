"""EasyR1 scripts start r1 unchanged, and an installed verl is never hidden."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from easyr1_runs import COMMANDS
from endtoend import ROOT

SHIM = ROOT / "packages/r1-easyr1"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with r1 and, as its wheel has it, the shim."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    shared = [sysconfig.get_paths()["purelib"], *sorted(ROOT.glob("packages/*/src"))]
    (packages / "shared.pth").write_text("\n".join(map(str, shared)))
    (packages / "r1_easyr1").symlink_to(SHIM / "src/r1_easyr1")
    (packages / "r1_easyr1.pth").write_text((SHIM / "r1_easyr1.pth").read_text())
    return folder / "bin/python"


def run(python: Path, *words: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", **variables}
    return subprocess.run([python, *words], cwd=cwd, env=environment, text=True, capture_output=True)


def test_a_command_of_easyr1_starts_r1_with_the_same_words(python: Path) -> None:
    words = [*COMMANDS["qwen2_5_vl_7b_geo3k_dapo"], "trainer.project_name=typed as it is"]
    shown = run(python, "-m", "verl.trainer.main", *words, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "project_name=typed as it is" in shown.stdout
    assert "online_filtering=true" in shown.stdout


def test_no_other_program_finds_a_verl(python: Path) -> None:
    assert "No module named 'verl'" in run(python, "-c", "import verl").stderr


@pytest.mark.parametrize("has_main", [True, False])
def test_a_real_verl_is_never_hidden(python: Path, tmp_path: Path, has_main: bool) -> None:
    trainer = tmp_path / "verl/trainer"
    trainer.mkdir(parents=True)
    (tmp_path / "verl/__init__.py").touch()
    (trainer / "__init__.py").touch()
    if has_main:
        (trainer / "main.py").write_text("print('the real one')")
    done = run(python, "-m", "verl.trainer.main", "--dry-run", cwd=tmp_path)
    if has_main:
        assert done.stdout == "the real one\n"
    else:
        assert done.returncode == 1
        assert f"the verl in {tmp_path / 'verl'} is not EasyR1's" in done.stderr
        assert "r1 train" in done.stderr
