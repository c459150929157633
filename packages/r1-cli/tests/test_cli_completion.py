"""Shell completion: the scripts are read by their shells, and complete commands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from r1_cli.main import SHELLS, main


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_that_its_shell_reads(shell: str, tmp_path: Path) -> None:
    script = CliRunner().invoke(main, ["completion", shell], catch_exceptions=False)
    assert script.exit_code == 0
    assert "_R1_COMPLETE" in script.output
    if program := shutil.which(shell):
        file = tmp_path / "script"
        file.write_text(script.output)
        checked = subprocess.run([program, "-n", file], capture_output=True, text=True, timeout=30, check=False)
        assert checked.returncode == 0, checked.stderr


def test_commands_and_options_are_completed() -> None:
    def completed(words: str, place: int) -> list[str]:
        asked = {"_R1_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        command = [sys.executable, "-c", "from r1_cli.main import main; main(prog_name='r1')"]
        said = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
        return [line.split(",", 1)[1] for line in said.stdout.splitlines()]

    assert completed("r1 tr", 1) == ["train"]
    assert "--dry-run" in completed("r1 train --d", 2)


def test_a_shell_that_is_not_known_is_named_with_those_that_are() -> None:
    result = CliRunner().invoke(main, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "tcsh" in result.output
    assert all(shell in result.output for shell in SHELLS)
