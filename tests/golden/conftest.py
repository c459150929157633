"""Which golden cases are replayed: those in the repository, or those of `--golden-dir`."""

import importlib
from pathlib import Path

import pytest
from golden import graders, graders_rlpr, replay

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-dir", type=Path, default=None, help="replay the algos_*.json of this folder instead")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_case" in metafunc.fixturenames:
        # The option is unknown when this folder was not named on the command line.
        folder = metafunc.config.getoption("--golden-dir", default=None) or HERE / "cases"
        # Those that test_golden_rewards.py replays are not skipped here but left out.
        cases = replay.load_cases(folder, elsewhere={*graders.FUNCTIONS, *graders_rlpr.FUNCTIONS})
        metafunc.parametrize("golden_case", cases, ids=[case["id"] for case in cases])


@pytest.fixture(scope="session")
def adapters():
    """All adapters: a table by case name, and the tables of explanations."""
    table = {}
    for file in sorted(HERE.glob("adapters_*.py")):
        module = importlib.import_module(f"golden.{file.stem}")
        twice = table.keys() & module.ALGOS.keys()
        assert not twice, f"{file.name} has adapters that another file has already: {sorted(twice)}"
        table |= module.ALGOS
    modules = [importlib.import_module(f"golden.{file.stem}") for file in sorted(HERE.glob("explained_*.py"))]
    return table, [module.EXPLAINED for module in modules]
