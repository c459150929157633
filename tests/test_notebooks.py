"""The notebooks of examples/ run as they are, and are kept without outputs."""

import json
from pathlib import Path

import nbformat
import pytest
from endtoend import ROOT
from nbclient import NotebookClient

NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
ORDER = ["first_run", "own_reward_and_data", "look_at_a_run"]  # the last reads what the first wrote


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_without_what_a_machine_adds(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 3
    assert not [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    assert not [cell["id"] for cell in notebook["cells"] if cell["metadata"]]
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert path.stat().st_size < 10_000


@pytest.mark.slow
def test_the_notebooks_run_and_print_nothing_but_what_their_cells_do(tmp_path: Path) -> None:
    """In one kernel, because half of what a notebook takes is the import of torch, and in a folder of its own."""
    assert sorted(path.stem for path in NOTEBOOKS) == sorted(ORDER)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    parts = [nbformat.read(ROOT / f"examples/notebooks/{name}.ipynb", as_version=4) for name in ORDER]
    whole = nbformat.v4.new_notebook(cells=[cell for part in parts for cell in part.cells])
    for number, cell in enumerate(whole.cells):
        cell.id = str(number)
    NotebookClient(whole, kernel_name="python3", timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [one for cell in whole.cells for one in cell.get("outputs", [])]
    printed = "".join(one.text for one in outputs if one.output_type == "stream")
    assert not [one.text for one in outputs if one.get("name") == "stderr"]
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("step ")] == [*map(str, range(1, 11))]
    assert "code/reward/reward.py" in printed
    assert "from step 0 → complete" in printed
    assert sum("image/png" in one.get("data", {}) for one in outputs) == 2
