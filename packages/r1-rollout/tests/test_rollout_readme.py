"""The README's examples run as they stand."""

import re
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

EXAMPLES = re.findall(r"```python\n(.*?)```", Path(__file__).parents[1].joinpath("README.md").read_text(), re.S)


def test_the_example_of_loading_prints_a_group_of_texts(capsys, monkeypatch, checkpoint):
    monkeypatch.setattr("r1_rollout.loading.find_spec", lambda name: None)  # else vLLM, where it is installed
    example = EXAMPLES[0].replace("Qwen/Qwen2.5-0.5B-Instruct", str(checkpoint))
    assert len([line for line in example.splitlines() if line]) == 4
    exec(compile(example, "README.md", "exec"), {})
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"0 (\[|, )(\(('.*?'|\".*?\"), -\d[^)]*\)(, |\])){4}$", line)


def test_the_example_of_a_trainer_samples_a_group_and_finds_its_weights_fresh(capsys):
    names: dict = {}
    for example in EXAMPLES[1:]:
        exec(compile(example, "README.md", "exec"), names)
    *lines, scores = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(re.match(r"0 \[[\d, ]+\] \[-", line) for line in lines)
    assert re.match(r"\[\[-[\d.]+, -[\d.]+, -[\d.]+\]\]$", scores)
    assert names["gap"] < 1e-5


def test_the_overrides_for_processors_are_the_workspaces_and_fit_every_package():
    root = Path(__file__).parents[3]
    overrides = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["override-dependencies"]
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    assert all(f"    {line}\n" in readme for line in overrides if not line.startswith("transformers"))
    chosen = {Requirement(line).name: str(Requirement(line).specifier).strip("=") for line in overrides}
    for path in root.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        for line in chain(project["dependencies"], *project.get("optional-dependencies", {}).values()):
            need = Requirement(line)
            if need.name in chosen:
                assert need.specifier.contains(chosen[need.name].replace("*", "0")), (path, line)
                assert any(one.operator == "<" for one in need.specifier), f"{path}: {line} has no upper bound"
