"""The README's tables are what the registries and docstrings say."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from core_table import README, TABLES, formula, rewrite, tables, wrong_rows


def test_no_row_of_the_readme_says_what_the_code_does_not():
    assert wrong_rows(README.read_text(encoding="utf-8")) == [], "run python tests/write_tables.py"


@pytest.mark.parametrize("registry", [registry for *_, registry in TABLES], ids=[title for title, *_ in TABLES])
def test_every_registered_name_has_a_row_with_a_formula_of_one_line(registry):
    rows = [re.split(r"(?<!\\)\|", line) for line in tables().splitlines() if line.startswith("| `")]
    assert all(len(row) == 6 and 3 < len(row[2].strip()) < 130 for row in rows)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    assert named >= set(registry)


def test_an_estimator_whose_docstring_has_one_paragraph_is_named_by_its_file(tmp_path: Path):
    file = tmp_path / "half.py"
    file.write_text('"""Half of the reward."""\n\nclass Half:\n    """Half."""\n')
    spec = importlib.util.spec_from_file_location("r1_core.advantages.half", file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        with pytest.raises(ValueError, match=r"half\.py: the module's docstring has one paragraph"):
            formula(module.Half)


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="lacks the markers"):
        rewrite("# r1-core\n")
