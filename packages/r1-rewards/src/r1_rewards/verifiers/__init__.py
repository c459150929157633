"""The built-in verifiers: one module each, found by its file name, with a function `score`."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import ModuleType

BUILTINS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find_verifier(name: str) -> ModuleType:
    return importlib.import_module(f"r1_rewards.verifiers.{name}")


def truth_problem(
    name: str,
    ground_truth: str,
    options: Mapping[str, object] | None = None,
    columns: Mapping[str, object] | None = None,
) -> str | None:
    """Return why no response can be right for this ground truth, or None. Runs no algebra.

    `options` are the verifier's own; it reads the `columns` of the data row that it needs.
    """
    find = vars(find_verifier(name)).get("truth_problem")
    if find is None:
        return None
    parameters = inspect.signature(find).parameters
    given = {**(columns or {}), **(options or {})}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters}
    found: str | None = find(ground_truth, **given)
    return found


def columns_of(name: str, options: Mapping[str, object] | None = None) -> set[str]:
    """Return the columns of a data row that the verifier reads and `options` do not set."""
    module = find_verifier(name)
    if name != "combine":
        return set(vars(module).get("TAKES", ())) - set(options or ())
    parts = module.read_parts((options or {}).get("parts")).values()
    return set().union(*(columns_of(part.reward, part.options) for part in parts if part.reward in BUILTINS))


def truth_is_answer(name: str) -> bool:
    """Whether the ground truth, written as a final answer, is scored as right. Tests of code, for example, are not."""
    return bool(vars(find_verifier(name)).get("TRUTH_IS_ANSWER", True))
