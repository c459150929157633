"""Mark the recipes' tests as slow, unless you name this folder: `uv run pytest tests/recipes` runs all."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is not `quick` as slow, unless this folder is named and nothing is said of marks."""
    named = any(HERE.name in Path(word.partition("::")[0]).parts for word in item.config.args)
    wanted = "quick" in item.keywords or (named and item.config.option.markexpr == "not slow")
    if item.path.is_relative_to(HERE) and not wanted:
        item.add_marker(pytest.mark.slow)
