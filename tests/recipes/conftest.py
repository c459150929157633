"""Mark the recipes' tests as slow, unless you name this folder: `uv run pytest tests/recipes` runs all."""

from pathlib import Path

import pytest
from endtoend import R1
from recipes.pages import EXAMPLES
from recipes.rows import write_rows

HERE = Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is not `quick` as slow, unless this folder is named and nothing is said of marks."""
    named = any(HERE.name in Path(word.partition("::")[0]).parts for word in item.config.args)
    wanted = "quick" in item.keywords or (named and item.config.option.markexpr == "not slow")
    if item.path.is_relative_to(HERE) and not wanted:
        item.add_marker(pytest.mark.slow)


@pytest.fixture
def desk(r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the repository's to who types commands there, with rows in place of the hub's."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
