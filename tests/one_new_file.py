"""A copy of the repository to which a test adds one file, to show that one new file is enough.

    copy = copy_repository(tmp_path)
    copy.add("packages/r1-core/src/r1_core/losses/mine.py", TEXT)  # refuses to overwrite: a new file, no edited one
    copy.r1("train", "examples/quickstart/config.yaml", "worker.actor.loss_type=mine", "--dry-run")
    copy.pytest("packages/r1-core/tests/test_core_readme.py")

A process that imports torch and transformers takes seconds, so do several things in one call of `python`.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    *("packages", "tests", "examples", "docs", "benchmarks", ".ci"),
    *("conftest.py", "README.md", "CONTRIBUTING.md", "pyproject.toml"),
)


@dataclass(frozen=True)
class Copy:
    """A repository of its own: its processes import the copied packages, not the installed ones."""

    root: Path

    def add(self, path: str, text: str) -> Path:
        """Write a new file, its path as seen from the root. Raises FileExistsError where there is one."""
        file = self.root / path
        with file.open("x") as new:
            new.write(text)
        return file

    def python(self, *words: str | Path, ok: bool = True) -> str:
        """What `python words` prints at the copy's root, errors included; it must succeed unless `ok=False`."""
        sources = sorted(str(path) for path in self.root.glob("packages/*/src"))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "COLUMNS": "200"}
        command = [sys.executable, *map(str, words)]
        process = subprocess.run(command, cwd=self.root, env=environment, text=True, capture_output=True)
        output = process.stdout + process.stderr
        assert not ok or process.returncode == 0, output
        return output

    def run(self, code: str) -> str:
        """What these lines of Python print."""
        return self.python("-c", code)

    def r1(self, *words: str | Path, ok: bool = True) -> str:
        """What `r1 words` prints."""
        return self.python("-c", "from r1_cli.main import main; main()", *words, ok=ok)

    def pytest(self, *words: str) -> str:
        """Run these tests of the copy, which must pass."""
        return self.python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words)


def copy_repository(folder: Path) -> Copy:
    """Copy the repository into `folder`, compiled modules included, so that they need not be compiled again."""
    for name in COPIED:
        source, target = ROOT / name, folder / "repository" / name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(source, target)
    return Copy(folder / "repository")
