"""Parse and check the reward that a configuration names."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from r1_rewards.reference.options import read_options
from r1_rewards.types import OpenVerifier, RewardSpecError, suggest
from r1_rewards.verifiers import BUILTINS, find_verifier
from r1_rewards.verifiers.combine import read_parts

SERVICES = {  # classes that run in the caller's process, because they run nobody's code
    "judge": "r1_rewards.services.judge:JudgeVerifier",
    "remote": "r1_rewards.services.remote:RemoteVerifier",
    "reward_model": "r1_rewards.services.reward_model:RewardModelVerifier",
}
MODEL_REWARDS = ("reference_probability",)  # which ask a model for log-probs: only a run has one


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A built-in verifier or a service (`path` is None), or a function in a user's file."""

    function: str
    path: Path | None = None  # absolute
    urls: str | None = None  # of reward servers, with commas between


def parse_spec(text: str) -> RewardSpec:
    """Parse "math", "path/file.py:function" or "http://host:5000/get_reward" without running anything.

    Raises RewardSpecError, with the nearest name, for an unknown verifier or a missing file.
    """
    if text in BUILTINS or text in SERVICES or text in MODEL_REWARDS:
        return RewardSpec(text)
    if text.startswith(("http://", "https://")):
        return RewardSpec("remote", urls=text)
    path_text, colon, function = text.rpartition(":")
    if not colon and not text.endswith(".py"):
        raise RewardSpecError(
            f"reward {text!r} is neither a built-in verifier nor file.py:function"
            + suggest(text, [*BUILTINS, *SERVICES, *MODEL_REWARDS])
        )
    if not colon or not function.isidentifier():
        raise RewardSpecError(
            f"reward {text!r}: name the function after a colon, as in {path_text or text}:compute_score"
        )
    path = Path(path_text).expanduser()
    if not isfile(path):
        neighbours = sorted(entry.name for entry in path.parent.glob("*.py")) if isdir(path.parent) else []
        raise RewardSpecError(f"reward {text!r}: there is no file {path.absolute()}" + suggest(path.name, neighbours))
    return RewardSpec(function, path.resolve())


def check_options(name: str, options: Mapping[str, object]) -> None:
    """Raise RewardSpecError if the built-in reward `name` does not have one of these options, or needs another."""
    if name in MODEL_REWARDS:
        read_options(options)
        return
    signature = inspect.signature(find_verifier(name).score)
    keywords = [key for key, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for key in options:
        if key not in keywords:
            raise RewardSpecError(f"the built-in reward {name!r} takes no {key!r}" + suggest(key, keywords))
    try:
        signature.bind("", "", **options)
    except TypeError as error:
        raise RewardSpecError(f"the built-in reward {name!r}: {error}") from error
    if name == "combine":
        _check_parts(options["parts"])


def check_settings(spec: RewardSpec, kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the keywords of a service without opening it. Raises RewardSpecError for unknown or missing ones."""
    settings = {"urls": spec.urls, **kwargs} if spec.urls else dict(kwargs)
    signature = inspect.signature(_service(spec))
    for key in settings:
        if key not in signature.parameters:
            raise RewardSpecError(f"the reward {spec.function!r} has no {key!r}" + suggest(key, signature.parameters))
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise RewardSpecError(f"the reward {spec.function!r}: {error}; set it in reward_function_kwargs") from error
    return settings


def open_service(spec: RewardSpec, kwargs: Mapping[str, object], defaults: Mapping[str, object]) -> OpenVerifier:
    """Open a service with `kwargs` and the `defaults` that it accepts.

    Raises RewardSpecError as `check_settings` does, and for values out of range.
    """
    settings, parameters = check_settings(spec, kwargs), inspect.signature(_service(spec)).parameters
    known = {key: value for key, value in defaults.items() if key in parameters}
    return _service(spec)(**{**known, **settings})


def _service(spec: RewardSpec) -> Callable[..., OpenVerifier]:
    module, _, kind = SERVICES[spec.function].partition(":")
    service: Callable[..., OpenVerifier] = vars(importlib.import_module(module))[kind]
    return service


def _check_parts(parts: Any) -> None:
    for name, part in read_parts(parts).items():
        try:
            spec = parse_spec(part.reward)
            if spec.function in SERVICES:
                check_settings(spec, part.options)
            elif spec.path is None:
                check_options(spec.function, part.options)
        except RewardSpecError as error:
            raise RewardSpecError(f"parts.{name}: {error}") from error
