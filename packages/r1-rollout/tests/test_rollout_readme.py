"""The README's examples run as they stand."""

import re
from pathlib import Path

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
