"""The README's examples run as they stand, one after the other."""

import re
from pathlib import Path


def test_the_readmes_examples_sample_a_group_and_find_its_weights_fresh(capsys):
    examples = re.findall(r"```python\n(.*?)```", Path(__file__).parents[1].joinpath("README.md").read_text(), re.S)
    names: dict = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    assert names["gap"] < 1e-5
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(re.match(r"0 \[[\d, ]+\] \[-", line) for line in lines)
