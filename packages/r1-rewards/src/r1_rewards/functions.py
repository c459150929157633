"""Load a reward function, find out its shape, call it, and read what it returns. Runs in a worker only.

A user's function has one of three shapes:

- batch (the default): `f(reward_inputs, **kwargs)` takes a list of mappings and returns a list of scores;
- sequential (the module says `REWARD_TYPE = "sequential"`): `f(reward_input, **kwargs)` takes one and returns one;
- columns, known by its parameter names: `f(prompts, responses, answers, **kwargs)` takes lists and returns a list.

A mapping has `response`, `response_length` (tokens), `ground_truth` and the data row's other columns of other names.
A score is a number, or a mapping with `overall` and any further numbers.
"""

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from r1_rewards.frames import Outcome
from r1_rewards.spec import RewardSpec, RewardSpecError, describe

COLUMNS = ("prompts", "responses", "answers")
WIRE_KEYS = ("response", "response_length", "ground_truth")


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded function; `call` takes samples as they come over the wire and returns raw scores."""

    name: str
    batch: bool  # whether the meaning of a score may depend on the batch
    call: Callable[[Sequence[Mapping[str, Any]]], Any]
    file: str | None = None  # the user's file, for line numbers


def load_function(spec: RewardSpec, kwargs: Mapping[str, Any]) -> RewardFunction:
    """Import what `spec` names. Raises RewardSpecError, with the line, for a file that fails or lacks the function."""
    if spec.path is None:
        return _load_builtin(spec.function, kwargs)
    module = _import_file(spec.path)
    function = getattr(module, spec.function, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise RewardSpecError(
            f"reward file {spec.path} has no function {spec.function!r}" + describe(spec.function, functions)
        )
    if inspect.iscoroutinefunction(function):
        raise RewardSpecError(f"reward function {spec.function} in {spec.path} is async; write it with a plain `def`")
    reward_type = getattr(module, "REWARD_TYPE", "batch")
    if reward_type not in ("batch", "sequential"):
        raise RewardSpecError(f"{spec.path}: REWARD_TYPE is {reward_type!r}; it must be 'batch' or 'sequential'")
    name = str(getattr(module, "REWARD_NAME", spec.path.stem))
    return _bind(function, name, reward_type == "batch", kwargs, spec.path)


def score_samples(function: RewardFunction, samples: Sequence[Mapping[str, Any]]) -> list[Outcome] | Outcome:
    """Call the function once and return one outcome per sample, or one failure for the whole call."""
    try:
        scores = function.call(samples)
    except BaseException as error:  # SystemExit too, and the time limits of libraries: any of them fails the call only
        return {"failure": ["exception", _describe_exception(error, function.file)]}
    if isinstance(scores, (str, bytes, Mapping)) or not hasattr(scores, "__len__") or not hasattr(scores, "__iter__"):
        return {"failure": ["wrong_shape", f"returned {type(scores).__name__}, not a list of scores"]}
    if len(scores) != len(samples):
        return {"failure": ["wrong_shape", f"returned {len(scores)} scores for {len(samples)} answers"]}
    return [read_score(score) for score in scores]


def read_score(score: Any) -> Outcome:
    """Read a number, or a mapping with `overall`, into parts; refuse what is not a finite number."""
    named = score if isinstance(score, Mapping) else {"overall": score}
    if "overall" not in named:
        return {"failure": ["wrong_shape", f"the score has no 'overall', only {sorted(map(str, named))}"]}
    parts = {}
    for key, value in named.items():
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            return {"failure": ["wrong_shape", f"{key!r} is {str(value)[:80]!r}, not a number"]}
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        except (TypeError, ValueError) as error:
            return {"failure": ["wrong_shape", f"{key!r} is not one number: {error}"]}
        if not math.isfinite(number):
            return {"failure": ["non_finite", f"{key!r} is {number}"]}
        parts[str(key)] = number
    return {"parts": parts}


def _load_builtin(name: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    if kwargs:
        raise RewardSpecError(f"the built-in reward {name!r} takes no reward_function_kwargs, got {sorted(kwargs)}")
    score = importlib.import_module(f"r1_rewards.{name}").score
    try:
        score(r"<answer>\boxed{x+1}</answer>", r"\boxed{1+x}")  # imports what the verifier needs, before any deadline
    except ImportError as error:
        raise RewardSpecError(str(error)) from error

    def call(samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [score(sample["response"], sample["ground_truth"]).parts for sample in samples]

    return RewardFunction(name, batch=False, call=call)


def _import_file(path: Path) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location("r1_reward_file", path)
    if module_spec is None or module_spec.loader is None:
        raise RewardSpecError(f"reward file {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and typing look their module up here
    # At the end, so that a neighbour called math.py cannot take the place of a standard module.
    sys.path += [str(path.parent), str(Path.cwd())]
    try:
        module_spec.loader.exec_module(module)
    except SyntaxError as error:
        raise RewardSpecError(f"reward file {path}, line {error.lineno}: {error.msg}") from error
    except BaseException as error:  # a file that calls sys.exit() must say so here, not end the worker
        reason = _describe_exception(error, str(path))
        raise RewardSpecError(f"reward file {path} cannot be imported: {reason}") from error
    return module


def _bind(
    function: Callable[..., Any], name: str, batch: bool, kwargs: Mapping[str, Any], path: Path
) -> RewardFunction:
    signature = inspect.signature(function)
    by_columns = all(column in signature.parameters for column in COLUMNS)
    _check_kwargs(function, signature, kwargs, by_columns, path)

    def call_columns(samples: Sequence[Mapping[str, Any]]) -> Any:
        return function(
            prompts=[sample["prompt"] for sample in samples],
            responses=[sample["response"] for sample in samples],
            answers=[sample["ground_truth"] for sample in samples],
            **kwargs,
        )

    def call_batch(samples: Sequence[Mapping[str, Any]]) -> Any:
        return function([_reward_input(sample) for sample in samples], **kwargs)

    def call_each(samples: Sequence[Mapping[str, Any]]) -> Any:
        return [function(_reward_input(sample), **kwargs) for sample in samples]

    if by_columns:
        return RewardFunction(name, True, call_columns, str(path))
    return RewardFunction(name, batch, call_batch if batch else call_each, str(path))


def _check_kwargs(
    function: Callable[..., Any],
    signature: inspect.Signature,
    kwargs: Mapping[str, Any],
    by_columns: bool,
    path: Path,
) -> None:
    where = f"reward function {getattr(function, '__name__', function)} in {path}"
    parameters = list(signature.parameters.values())
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = [name for name in named if name not in COLUMNS] if by_columns else named[1:]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for key in kwargs:
        if key not in accepted and not open_ended:
            raise RewardSpecError(f"{where} does not accept reward_function_kwargs.{key}" + describe(key, accepted))
    try:
        if by_columns:
            signature.bind(prompts=[], responses=[], answers=[], **kwargs)
        else:
            signature.bind([], **kwargs)
    except TypeError as error:
        raise RewardSpecError(
            f"{where}: {error}; it is called with one list or mapping and reward_function_kwargs {sorted(kwargs)}"
        ) from error


def _reward_input(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {**sample["metadata"], **{key: sample[key] for key in WIRE_KEYS}}


def _describe_exception(error: BaseException, file: str | None) -> str:
    """Return the type, the text and the last line of the user's file that was running."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {lines[-1]} of {Path(file).name})" if lines and file else ""
    return f"{type(error).__name__}: {str(error)[:500]}{where}"
