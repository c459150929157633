"""Services: verifiers that run no code of users or models, and therefore run in the caller's process.

Each is a class of keyword arguments; `worker.reward.reward_function_kwargs` of a run are these.
"""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

from r1_rewards.spec import SERVICES, RewardSpec, RewardSpecError, describe
from r1_rewards.types import OpenVerifier, RewardInput, Score


class Service(ABC):
    """What these verifiers share: a `with` block closes them."""

    # A server may look at a whole batch, and a model's logits depend on the padding: only some can say otherwise.
    per_sample: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]: ...

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what the verifier holds; safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_service(spec: RewardSpec, kwargs: Mapping[str, Any], defaults: Mapping[str, Any]) -> OpenVerifier:
    """Return the service that `spec` names, made with `kwargs`, and with those of `defaults` that it knows.

    Raises RewardSpecError as `check_settings` does, and for values of no use.
    """
    settings, parameters = check_settings(spec, kwargs), inspect.signature(_service(spec)).parameters
    known = {key: value for key, value in defaults.items() if key in parameters}
    opened: OpenVerifier = _service(spec)(**{**known, **settings})
    return opened


def check_settings(spec: RewardSpec, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of the service that `spec` names, without opening it.

    Raises RewardSpecError for keywords that are unknown, with the nearest, or missing.
    """
    settings = {"urls": spec.urls, **kwargs} if spec.urls else dict(kwargs)
    signature = inspect.signature(_service(spec))
    for key in settings:
        if key not in signature.parameters:
            raise RewardSpecError(f"the reward {spec.function!r} has no {key!r}" + describe(key, signature.parameters))
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise RewardSpecError(f"the reward {spec.function!r}: {error}; set it in reward_function_kwargs") from error
    return settings


def _service(spec: RewardSpec) -> Callable[..., Any]:
    module, _, kind = SERVICES[spec.function].partition(":")
    service: Callable[..., Any] = getattr(importlib.import_module(module), kind)
    return service
