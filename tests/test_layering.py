"""Leaf packages never import one another, no import leads back to itself, and light imports load nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import measure
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["r1_core", "r1_rollout", "r1_rewards", "r1_data", "r1_cli"]
LEAVES = PACKAGES[:-1]

# What users import from the packages themselves. It stays importable, whichever module has it.
PUBLIC = {
    "r1_core": """
        AdvantageInputs Batching Learner LossInputs MicroLimit Objective Parallel Sample Shard build_optimizer
        find_blocks learning_rate_scale shard_model token_logprobs
    """,
    "r1_rollout": """
        Canary Completion Deadlines EmbeddedEngine Endpoint LoadedEngine LocalServer LocalWeights SamplingParams
        ServerPool TOLERANCE VllmEngine find_fault load text_probes vllm_command
    """,
    "r1_rewards": """
        Cause Failure FailurePolicy OpenVerifier PooledVerifier RewardFailure RewardInput RewardSpecError Score Verifier
        load
        box choice code combine dapo format geo3k gsm8k gsm8k_verl language length lmm_r1 math math_dapo math_easyr1
        math_verl numeric point prime_math r1v r1v_easyr1 repetition search_r1 text
        extract reference_probability
    """,
    "r1_data": """
        Columns Conversation DataError Demonstration Detected Downloads Example MediaError Mixture Prompt PromptDataset
        Renderer RowReader Rows Stream Summary Turns Video WeightedStream answers_per_prompt collate
        compile_format_prompt count_rows detect detect_columns name_source position_ids_of read_rows read_sources
        to_example
    """,
    "r1_cli": "ConfigError Group OpenRun Response RunConfig RunReader Step open open_run read_config",
}
OTHERS = {"r1_data": "ConversationReader"}  # that are public, and may go
# Classes that stand in users' server commands by their dotted path, and what a package's command runs.
DOTTED = [
    ("r1_rollout.vllm.guard", "TokenGuard"),
    ("r1_rollout.vllm.receiver", "WeightReceiver"),
    ("r1_rollout.vllm.plain_logprobs", "PlainLogprobs"),
    ("r1_cli.main", "main"),
    ("r1_rewards.main", "main"),
]


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
    guilty = {str(path): found for path in sources(leaf) if (found := imported_roots(path) & {*PACKAGES} - {leaf})}
    assert not guilty


def test_no_module_and_no_package_imports_itself_through_others() -> None:
    assert not measure.all_cycles()


def test_an_import_cycle_of_modules_or_of_packages_is_found() -> None:
    graph = {"p.a.x": {"p.b.y"}, "p.b.y": set(), "p.b.z": {"p.a.w"}, "p.a.w": set(), "p.c": {"p.a.x"}}
    assert not measure.cycles(graph)
    assert measure.cycles(measure.package_imports(graph, "p")) == [["p.a", "p.b", "p.a"]]
    assert measure.cycles({**graph, "p.a.w": {"p.c"}, "p.b.y": {"p.b.z"}})


def test_a_module_stands_on_a_level_above_all_that_it_imports() -> None:
    graph = {"p": {"p.b"}, "p.a": {"p.b", "p.c"}, "p.b": {"p.c"}, "p.c": set()}
    assert measure.levels(graph) == [["p.c"], ["p.b"], ["p", "p.a"]]


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("if TYPE_CHECKING:\n    from p.b import C", "p.b"),
        ("def f():\n    from . import d", "p.d"),
        ("def f():\n    import p.e", "p.e"),
        ("def f():\n    return importlib.import_module('p.e').g", "p.e"),
        ("def f():\n    return import_module('.d', 'p')", "p.d"),
        ("def f(name):\n    return import_module(f'p.{name}')", None),
    ],
)
def test_imports_are_read_wherever_they_stand(statement: str, found: str | None, tmp_path: Path) -> None:
    file, empty = tmp_path / "a.py", tmp_path / "empty.py"
    file.write_text(statement + "\n")
    empty.touch()
    graph = measure.module_imports({"p.a": file, **dict.fromkeys(("p.b", "p.d", "p.e"), empty)})
    assert graph["p.a"] == ({found} if found else set())


def test_lines_of_code_leave_out_docstrings_comments_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        '"""Module.\n\nMore.\n"""\n\nX = """\ntext\n"""  # comment\n\n\ndef f():\n    """Say."""\n    return 1\n'
    )
    assert measure.lines_of_code(file) == 5


def test_what_is_over_its_limit_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LIMITS", {"lines": 10})
    assert str(measure.Measure("lines", 11, ("a.py",))).splitlines()[0].endswith("at most 10      TOO MUCH")
    assert not measure.Measure("lines", 10).too_much
    assert not measure.Measure("files", 11).too_much


@pytest.mark.parametrize("package", PUBLIC)
def test_what_users_import_from_a_package_stays_there(package: str) -> None:
    module = import_module(package)
    assert not [name for name in PUBLIC[package].split() if not hasattr(module, name)]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_public_names_and_says_its_version(package: str) -> None:
    module = import_module(package)
    assert all(hasattr(module, name) for name in module.__all__)
    assert {*module.__all__, "__version__"} <= {*dir(module)}
    assert {*PUBLIC[package].split()} <= {*dir(module)}
    assert module.__version__ == version(package.replace("_", "-"))
    assert {"load", "Learner", "Prompt", "open_run"} & {*module.__all__}


def names_for_type_checkers(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield each name that a type checker finds in a module, and the module that it is imported from, if it is."""
    for node in body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((one.asname or one.name, getattr(node, "module", one.name)) for one in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ""
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), ""
        elif isinstance(node, ast.If):
            read = {"TYPE_CHECKING": node.body, "not TYPE_CHECKING": node.orelse}
            yield from names_for_type_checkers(read.get(ast.unparse(node.test), [*node.body, *node.orelse]))


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_and_editors_see_every_public_name_and_no_other(package: str) -> None:
    """Read from the source, as they do: names that are loaded when first asked for stand there for them."""
    module = import_module(package)
    found = dict(names_for_type_checkers(ast.parse(Path(str(module.__file__)).read_text()).body))
    assert {*PUBLIC[package].split(), "__version__"} <= {*found}
    assert "__getattr__" not in found, "it would make every misspelt name a right one"
    modules = {name for name in PUBLIC[package].split() if isinstance(getattr(module, name), ModuleType)}
    assert {*module.__all__} == {*PUBLIC[package].split()} - modules - {"open"} | {*OTHERS.get(package, "").split()}
    assert {*module.__all__} <= {*found}
    for name in {*found} & {*PUBLIC[package].split()}:
        place = import_module(found[name])
        original = "open_parts" if name == "open" else name
        value = import_module(f"{found[name]}.{name}") if name in modules else getattr(place, original)
        assert value is getattr(module, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_tells_type_checkers_that_it_is_typed(package: str) -> None:
    assert (Path(str(import_module(package).__file__)).parent / "py.typed").is_file()


@pytest.mark.parametrize(("module", "name"), DOTTED)
def test_dotted_paths_that_users_type_exist(module: str, name: str) -> None:
    """The files are read and not imported, because some need vLLM."""
    path = ROOT / "packages" / module.split(".")[0].replace("_", "-") / "src" / (module.replace(".", "/") + ".py")
    assert name in {getattr(node, "name", "") for node in ast.parse(path.read_text()).body}


def test_rewards_never_import_torch_but_for_reward_models() -> None:
    guilty = {path.name for path in sources("r1_rewards") if imported_roots(path) & {"torch", "transformers"}}
    assert guilty == {"reward_model.py"}  # inside functions: see the light imports below


def test_core_needs_torch_and_safetensors_only() -> None:
    allowed = {"torch", "safetensors", "r1_core"} | set(sys.stdlib_module_names)
    guilty = {path.name: found for path in sources("r1_core") if (found := imported_roots(path) - allowed)}
    assert not guilty


def test_light_imports_load_nothing_heavy() -> None:
    statements = ["from r1_rewards import math", "import r1_rewards.services.reward_model, r1_rewards.main"]
    statements += ["import r1_data.sources", "import r1_cli.main", "import r1_cli.config", "import r1_cli.jobs.stages"]
    heavy = {"torch", "transformers", "datasets", "sympy", "ray", "vllm", "fastapi", "httpx"}
    code = f"""
import sys
for statement in {statements}:
    exec(statement)
    assert not (found := {heavy} & set(sys.modules)), (statement, found)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", [*LEAVES, "r1_cli"])
def test_every_module_has_a_docstring(module: str) -> None:
    silent = [path for path in sources(module) if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


@pytest.mark.slow  # imports everything that a run imports
def test_a_run_of_single_answers_loads_nothing_of_episodes() -> None:
    parts = ("r1_cli.train.episodes", "r1_cli.train.groups.trajectory", "r1_data.turns", "r1_rewards.environments")
    code = f"import sys, r1_cli.jobs.train; assert not [m for m in sys.modules if m.startswith({parts})]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_benchmark_and_no_test_helper_have_one_name() -> None:
    """Both are imported by name, and a spawned rank would import whichever folder comes first in `sys.path`."""
    helpers = {path.stem for folder in ("tests", "packages/*/tests") for path in ROOT.glob(f"{folder}/*.py")}
    assert sorted(path.name for path in ROOT.glob("benchmarks/*.py") if path.stem in helpers) == []
