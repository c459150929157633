"""The README's example runs as it stands."""

import re
from pathlib import Path


def test_the_readme_example_samples_a_group(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", Path(__file__).parents[1].joinpath("README.md").read_text(), re.S)
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(re.match(r"0 \[[\d, ]+\] \[-", line) for line in lines)
