"""The pages under docs/: what they name exists, and the output they show is real."""

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from docs_site import navigation
from endtoend import QUICKSTART, ROOT

from r1_cli.build.algorithm import try_algorithm
from r1_cli.config import load_config
from r1_cli.main import main
from r1_cli.plan.check.checks import PARTS

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/**/README.md"))]
NAME = re.compile(r"`([\w./-]+\.py):([A-Za-z_][\w.]*)`")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def definitions(source: str) -> Iterator[str]:
    """The names of functions, classes and methods: `f`, `C`, `C.m`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef))


def test_every_function_that_a_page_names_is_in_its_file() -> None:
    named = {
        match for page in DOCS for match in NAME.findall(page.read_text()) if not match[0].startswith(("./", "file.py"))
    }
    assert len(named) >= 15
    missing = [
        f"{path}:{name}"
        for path, name in sorted(named)
        if not (ROOT / path).is_file() or name not in definitions((ROOT / path).read_text())
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_readme_leads_to_an_index_of_every_page() -> None:
    assert "](docs/index.md)" in (ROOT / "README.md").read_text()
    listed = set(re.findall(r"'([\w./-]+\.md)'", repr(navigation(ROOT / "docs/index.md"))))
    assert not [str(page) for page in DOCS if page.relative_to(ROOT / "docs").as_posix() not in listed]


@pytest.mark.slow
def test_the_numbers_of_one_step_are_those_of_the_page() -> None:
    """Words to the letter; numbers to 0.02, as processors round differently."""
    page = (ROOT / "docs/one-step.md").read_text().split("```text\n")[1].split("\n```")[0]
    command = [sys.executable, str(ROOT / "docs/one_step.py")]
    printed = subprocess.run(command, text=True, capture_output=True, check=True, cwd=ROOT).stdout.strip()
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("#", printed) == number.sub("#", page)
    shown, found = ([float(value) for value in number.findall(text)] for text in (page, printed))
    assert found == pytest.approx(shown, abs=0.02)


def test_the_own_loss_and_estimator_of_the_page_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/own-loss-or-estimator.md").read_text()
    (tmp_path / "mine.py").write_text(page.split("```python\n")[1].split("```")[0])
    own = [f"algorithm.adv_estimator={tmp_path}/mine.py:estimator", f"worker.actor.loss_type={tmp_path}/mine.py:loss"]
    try_algorithm(load_config([QUICKSTART, *own])[0])


def test_the_estimates_of_the_page_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/estimate.md").read_text().split("```console\n")[1].split("```")[0]
    for line in page.splitlines():
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
        assert "fits" in result.output


def test_the_checks_of_the_page_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the step, which takes long and is tested by itself."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/check.md").read_text()
    for line in page.split("```console\n")[1].split("```")[0].splitlines()[1:]:
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["ok"]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(PARTS)
