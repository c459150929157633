"""The built-in verifiers, one module each with a function `score`; a new file is found by its name."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

BUILTINS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find_verifier(name: str) -> ModuleType:
    """Import the module of a built-in verifier, one of BUILTINS."""
    return importlib.import_module(f"r1_rewards.verifiers.{name}")


def truth_problem(
    name: str, ground_truth: str, options: Mapping[str, Any] | None = None, columns: Mapping[str, Any] | None = None
) -> str | None:
    """Return why no response can be right for a ground truth by the verifier `name`, or None; runs no algebra.

    `options` are the verifier's, `columns` those of the data row, of which each verifier takes its own.
    """
    find = getattr(find_verifier(name), "truth_problem", None)
    if find is None:
        return None
    parameters = inspect.signature(find).parameters
    given = {**(columns or {}), **(options or {})}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters}
    found: str | None = find(ground_truth, **given)
    return found


def columns_of(name: str, options: Mapping[str, Any] | None = None) -> set[str]:
    """Return the columns of a data row that the verifier `name` takes where `options` do not set them."""
    module = find_verifier(name)
    if name != "combine":
        return set(getattr(module, "TAKES", ())) - set(options or ())
    parts = module.read_parts((options or {}).get("parts")).values()
    return set().union(*(columns_of(part.reward, part.options) for part in parts if part.reward in BUILTINS))


def truth_is_answer(name: str) -> bool:
    """Whether the ground truth of the verifier `name`, written as an answer, is right; tests of code are no answer."""
    return bool(getattr(find_verifier(name), "TRUTH_IS_ANSWER", True))
