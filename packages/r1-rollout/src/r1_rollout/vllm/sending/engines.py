"""The engines that weights are sent to, as all ways of sending call them."""

from typing import Any, Protocol


class Engines(Protocol):
    """All engines at the same time; a call returns when each has done it. vLLM calls it a `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join what the weights come over."""

    def start_weight_update(self) -> None:
        """Let the workers expect weights."""

    def update_weights(self, update_info: Any) -> None:
        """Let the workers load some tensors."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the workers use what has come."""


class Patient:
    """Engines that are called no more once one has failed, so that ranks which gather together end their pass."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._error: Exception | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._try("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._try("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._try("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._try("finish_weight_update")

    def raise_error(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise self._error

    def _try(self, verb: str, *infos: Any) -> None:
        if self._error is None:
            try:
                getattr(self._engines, verb)(*infos)
            except Exception as error:  # raised by `raise_error`
                self._error = error
