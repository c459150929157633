"""The rule of the house: leaves never import one another, and light things load nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEAVES = ["r1_core", "r1_rollout", "r1_rewards", "r1_data"]


def imported_roots(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split(".")[0] for name in names}


def sources(module: str) -> list[Path]:
    return sorted((ROOT / "packages" / module.replace("_", "-") / "src").rglob("*.py"))


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_imports_no_other_package_of_r1(leaf: str) -> None:
    assert sources(leaf)
    others = {"r1_core", "r1_rollout", "r1_rewards", "r1_data", "r1_cli"} - {leaf}
    guilty = {str(path): found for path in sources(leaf) if (found := imported_roots(path) & others)}
    assert not guilty


def test_rewards_never_import_torch_but_for_reward_models() -> None:
    guilty = {path.name for path in sources("r1_rewards") if imported_roots(path) & {"torch", "transformers"}}
    assert guilty == {"reward_model.py"}  # inside functions: see the light imports below


def test_core_needs_torch_and_safetensors_only() -> None:
    allowed = {"torch", "safetensors", "r1_core"} | set(sys.stdlib_module_names)
    guilty = {path.name: found for path in sources("r1_core") if (found := imported_roots(path) - allowed)}
    assert not guilty


@pytest.mark.parametrize(
    "statement",
    [
        "import r1_rewards",
        "from r1_rewards import math",
        "import r1_rewards.services.reward_model, r1_rewards.main",
        "import r1_data",
        "import r1_data.sources",
        "import r1_cli.main",
        "import r1_cli.config",
    ],
)
def test_light_imports_load_nothing_heavy(statement: str) -> None:
    heavy = {"torch", "transformers", "datasets", "sympy", "ray", "vllm", "fastapi", "httpx"}
    code = f"import sys; {statement}; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", [*LEAVES, "r1_cli"])
def test_every_module_says_what_its_room_is_for(module: str) -> None:
    silent = [path for path in sources(module) if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent
