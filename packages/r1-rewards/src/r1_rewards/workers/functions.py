"""Load a reward function, call it, and convert what it returns. Runs in a worker, or behind `in_process`."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from r1_rewards.spec import MODEL_REWARDS, SERVICES, RewardSpec, check_options, open_service, parse_spec
from r1_rewards.types import Cause, Failure, Outcome, RewardInput, RewardSpecError, Score, read_score, suggest
from r1_rewards.verifiers import combine, find_verifier
from r1_rewards.workers.arguments import make_call, read_signature
from r1_rewards.workers.frames import WireSample
from r1_rewards.workers.source import describe_exception, import_file

P = ParamSpec("P")
T = TypeVar("T")

# What a built-in verifier may ask for by name.
SAMPLE_KEYS: tuple[Literal["prompt", "response_length"], ...] = ("prompt", "response_length")
ALGEBRA = ("r1_rewards.verifiers.math", "r1_rewards.reading.prm800k")  # what imports SymPy when it is first asked
WARM_UP = (
    ("(x+2)(x-3)", "x^2-x-6"),
    ("(x+2)(x+3)", "x^2-x-6"),
    (r"\sqrt{28}", r"2\sqrt{7}"),
    (r"\frac{6}{8}", "0.75"),
    (r"2\pi + 1", r"2\pi"),
    (r"\{3, 1\}", r"\{1, 3\}"),
    ("(1, 5]", "[1, 5]"),
    ("x = 3", "3"),
)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    name: str
    batch: bool  # whether the meaning of a score may depend on the batch
    call: Callable[[Sequence[WireSample]], object]
    file: str | None = None  # the user's file, for line numbers
    shape: str = "builtin"
    wants: tuple[str, ...] = ()  # what it asks for by its parameters' names


def load_function(spec: RewardSpec, kwargs: Mapping[str, object]) -> RewardFunction:
    """Import the function that `spec` names. Raises RewardSpecError, with the line, if the file fails or lacks it."""
    if spec.path is None and spec.function in SERVICES:
        return _load_service(spec, kwargs)
    if spec.path is None and spec.function in MODEL_REWARDS:
        raise RewardSpecError(f"the reward {spec.function!r} asks the model that is trained, which no worker has")
    if spec.path is None:
        return _load_builtin(spec.function, kwargs)
    module = import_file(spec.path)
    names = vars(module)
    function = names.get(spec.function)
    if not callable(function):
        found = {name: value for name, value in names.items() if inspect.isfunction(value)}
        functions = [name for name, value in found.items() if value.__module__ == module.__name__]
        raise RewardSpecError(
            f"reward file {spec.path} has no function {spec.function!r}" + suggest(spec.function, functions)
        )
    with contextlib.suppress(ImportError):
        _warm_algebra()
    where = f"reward function {spec.function} in {spec.path}"
    return read_function(function, kwargs, names, name=spec.path.stem, where=where, file=str(spec.path))


def read_function(
    function: Callable[..., Any],
    kwargs: Mapping[str, object],
    names: Mapping[str, Any],
    *,
    name: str,
    where: str,
    file: str | None,
) -> RewardFunction:
    """Find out how a user's function is called; `names` are the variables of its module, which may have settings.

    Raises RewardSpecError, which begins with `where`, if it cannot be called.
    """
    reward_type = names.get("REWARD_TYPE")
    if reward_type not in (None, "batch", "sequential"):
        raise RewardSpecError(f"{where}: REWARD_TYPE is {reward_type!r}; it must be 'batch' or 'sequential'")
    completions = names.get("COMPLETIONS")
    signature = read_signature(function, kwargs, reward_type=reward_type, completions=completions, where=where)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        function = _to_plain(function)
    call, name = make_call(function, signature, kwargs), str(names.get("REWARD_NAME", name))
    return RewardFunction(name, not signature.one_by_one, call, file, signature.shape, signature.wants)


def score_samples(function: RewardFunction, samples: Sequence[WireSample]) -> list[Outcome] | Failure:
    try:
        scores = function.call(samples)
    except BaseException as error:  # SystemExit too, and the time limits of libraries: any of them fails the call only
        cause: Cause = "out_of_memory" if isinstance(error, MemoryError) else "exception"
        return Failure(cause, describe_exception(error, function.file))
    if isinstance(scores, (str, bytes, Mapping)) or not (isinstance(scores, Sized) and isinstance(scores, Iterable)):
        return Failure("wrong_shape", f"returned {type(scores).__name__}, not a list of scores")
    if len(scores) != len(samples):
        return Failure("wrong_shape", f"returned {len(scores)} scores for {len(samples)} responses")
    return [read_score(score) for score in scores]


def _load_builtin(name: str, options: Mapping[str, object]) -> RewardFunction:
    check_options(name, options)
    if name == "combine":
        return _load_sum(options["parts"])
    if name == "code":
        _try_sandbox()
    module = find_verifier(name)
    score = module.score
    keywords = inspect.signature(score).parameters
    columns = [key for key in vars(module).get("TAKES", ()) if key not in options]
    fills = [key for key in SAMPLE_KEYS if key in keywords and key not in options]
    try:
        _warm_algebra()
        if prepare := vars(module).get("prepare"):  # slow imports, before workers are forked
            prepare()
    except ImportError as error:
        raise RewardSpecError(str(error)) from error

    def call(samples: Sequence[WireSample]) -> list[object]:
        return [
            score(
                sample["response"], sample["ground_truth"], **options,
                **{key: sample[key] for key in fills},
                **{key: sample["metadata"][key] for key in columns if key in sample["metadata"]},
            )
            for sample in samples
        ]  # fmt: skip

    return RewardFunction(name, batch=False, call=call)


def _try_sandbox() -> None:
    from r1_rewards.sandbox import execution as sandbox

    try:
        active = sandbox.describe()
    except sandbox.SandboxError as error:
        raise RewardSpecError(f"the reward 'code': {error}") from error
    print(f"r1-rewards: judged code runs protected by: {', '.join(active)}", file=sys.stderr)


def _load_service(spec: RewardSpec, kwargs: Mapping[str, object]) -> RewardFunction:
    verify = open_service(spec, kwargs, {})

    def call(samples: Sequence[WireSample]) -> list[object]:
        scores = verify([_to_input(sample) for sample in samples])
        for score in scores:
            if score.error:
                raise RuntimeError(f"{score.error.cause}: {score.error.message}")
        return list(scores)

    return RewardFunction(spec.function, batch=True, call=call)


def _to_input(sample: WireSample) -> RewardInput:
    return RewardInput(
        sample["response"], sample["ground_truth"], sample["response_length"], sample["prompt"], sample["metadata"],
        sample["messages"], step=sample["step"], source=sample["source"],
    )  # fmt: skip


def _load_sum(parts: Any) -> RewardFunction:
    functions = {
        name: load_function(parse_spec(part.reward), part.options) for name, part in combine.read_parts(parts).items()
    }

    def call(samples: Sequence[WireSample]) -> list[object]:
        found = {name: _scores_of(name, function, samples) for name, function in functions.items()}
        rows = ({name: scores[place] for name, scores in found.items()} for place in range(len(samples)))
        return [combine.weighted_sum(row, parts) for row in rows]

    return RewardFunction("combine", any(function.batch for function in functions.values()), call)


def _scores_of(name: str, function: RewardFunction, samples: Sequence[WireSample]) -> list[Score]:
    found = score_samples(function, samples)
    scores = []
    for outcome in [found] if isinstance(found, Failure) else found:
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{name}: {outcome.cause}: {outcome.message}")
        scores.append(outcome)
    return scores


def _warm_algebra() -> None:
    """Import SymPy and fill its caches before workers are forked.

    A new process's first product, root or set takes up to half a second. Raises ImportError without Math-Verify.
    """
    if not any(name in sys.modules for name in ALGEBRA):
        return
    from r1_rewards.verifiers import math as verifier

    for response, truth in WARM_UP:
        verifier.score(rf"\boxed{{{response}}}", truth)


def _to_plain(function: Callable[P, Coroutine[object, object, T]]) -> Callable[P, T]:
    import asyncio

    @functools.wraps(function)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        return asyncio.run(function(*args, **kwargs))

    return wait
