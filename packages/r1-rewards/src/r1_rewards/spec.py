"""Which verifier a configuration names: a built-in one, a service, or a function in a user's file."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The modules of `verifiers`, each with a function `score`: a new one is found by its name.
BUILTINS = tuple(sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "verifiers")])))
SERVICES = {  # classes that run in the caller's process, because they run nobody's code
    "judge": "r1_rewards.services.judge:JudgeVerifier",
    "remote": "r1_rewards.services.remote:RemoteVerifier",
    "reward_model": "r1_rewards.services.reward_model:RewardModelVerifier",
}
MODEL_REWARDS = ("reference_probability",)  # which ask a model for log-probs: only a run has one


class RewardSpecError(ValueError):
    """A reward that cannot be used as configured; the message says what was found and what to write instead."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A built-in verifier or a service (`path` is None, `function` its name), or a function of a user's file."""

    function: str
    path: Path | None = None  # absolute
    urls: str | None = None  # of reward servers, with commas between


def parse_spec(text: str) -> RewardSpec:
    """Read "math", "path/file.py:function" or "http://host:5000/get_reward", without running anything.

    Raises RewardSpecError for an unknown name (with the nearest one) and for a missing file (with its neighbours).
    """
    if text in BUILTINS or text in SERVICES or text in MODEL_REWARDS:
        return RewardSpec(text)
    if text.startswith(("http://", "https://")):
        return RewardSpec("remote", urls=text)
    path_text, colon, function = text.rpartition(":")
    if not colon and not text.endswith(".py"):
        raise RewardSpecError(
            f"reward {text!r} is neither a built-in verifier nor file.py:function"
            + describe(text, [*BUILTINS, *SERVICES, *MODEL_REWARDS])
        )
    if not colon or not function.isidentifier():
        raise RewardSpecError(
            f"reward {text!r}: name the function after a colon, as in {path_text or text}:compute_score"
        )
    path = Path(path_text).expanduser()
    if not path.is_file():
        neighbours = sorted(entry.name for entry in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise RewardSpecError(f"reward {text!r}: there is no file {path.absolute()}" + describe(path.name, neighbours))
    return RewardSpec(function, path.resolve())


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise RewardSpecError for an option that the built-in verifier `name` does not have, or that it needs."""
    if name in MODEL_REWARDS:
        importlib.import_module("r1_rewards.reference.options").read_options(options)
        return
    module = importlib.import_module(f"r1_rewards.verifiers.{name}")
    signature = inspect.signature(module.score)
    keywords = [key for key, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for key in options:
        if key not in keywords:
            raise RewardSpecError(f"the built-in reward {name!r} takes no {key!r}" + describe(key, keywords))
    try:
        signature.bind("", "", **options)
    except TypeError as error:
        raise RewardSpecError(f"the built-in reward {name!r}: {error}") from error
    if name == "combine":
        module.check(**options)


def truth_problem(
    name: str, ground_truth: str, options: Mapping[str, Any] | None = None, columns: Mapping[str, Any] | None = None
) -> str | None:
    """Return why no response could be right for a truth by the built-in verifier `name`, or None; runs no algebra.

    `options` are the verifier's, `columns` those of the data row, of which each verifier takes its own.
    """
    find = getattr(importlib.import_module(f"r1_rewards.verifiers.{name}"), "truth_problem", None)
    if find is None:
        return None
    parameters = inspect.signature(find).parameters
    given = {**(columns or {}), **(options or {})}
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters}
    found: str | None = find(ground_truth, **given)
    return found


def columns_of(name: str, options: Mapping[str, Any] | None = None) -> set[str]:
    """Return the columns of a data row that a built-in verifier takes where `options` do not say them."""
    module = importlib.import_module(f"r1_rewards.verifiers.{name}")
    if name != "combine":
        return set(getattr(module, "TAKES", ())) - set(options or ())
    parts = module.read_parts((options or {}).get("parts")).values()
    return set().union(*(columns_of(part.reward, part.options) for part in parts if part.reward in BUILTINS))


def truth_is_answer(name: str) -> bool:
    """Whether a truth of a built-in verifier, written as an answer, has to be right: tests, for one, are no answer."""
    return bool(getattr(importlib.import_module(f"r1_rewards.verifiers.{name}"), "TRUTH_IS_ANSWER", True))


def describe(wanted: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the name nearest to `wanted`, and all that exist."""
    names = sorted(names)
    nearest = difflib.get_close_matches(wanted, names, n=1)
    suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ""
    listing = f" (there are: {', '.join(names)})" if names else " (there are none)"
    return suggestion + listing
