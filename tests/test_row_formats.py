"""A new row format is one new file, tested in a copy of the packages."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def test_a_new_format_is_one_new_file_and_no_edited_one(tmp_path):
    packages = tmp_path / "packages"
    for name in ("r1_data", "r1_cli"):
        source = Path(importlib.import_module(name).__file__).parent
        shutil.copytree(source, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "r1_data" / "row_formats" / "quiz.py").write_text(
        '"""A quiz."""\n\nPROMPTS = ("ask",)\nGROUND_TRUTHS = ("key",)\nBEFORE = ("easyr1",)\n'
    )
    (tmp_path / "train.jsonl").write_text('{"ask": "How many?", "key": "3", "problem": "no", "answer": "no"}\n')
    script = f"""
from r1_cli.build.rows import open_sources
from r1_cli.config.data import DataConfig
from r1_cli.config.sources import training_sources
for named in (None, "quiz"):
    config = DataConfig(train_files="{tmp_path}/train.jsonl", row_format=named)
    [one] = open_sources(training_sources(config))
    print(one.detected.format, one.reader(*one.rows[0]).ground_truth)
"""
    found = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(packages)}, capture_output=True, text=True
    )
    assert found.stdout.split() == ["quiz", "3"] * 2, found.stderr
