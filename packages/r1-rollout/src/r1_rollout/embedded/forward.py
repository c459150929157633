"""The forward pass of any family with a cache, under the names that the family has for its arguments."""

from inspect import signature
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.cache_utils import Cache

from r1_rollout.embedded.states import CACHES, asks_linear_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Forward:
    def __init__(self, model: "PreTrainedModel") -> None:
        parameters = signature(model.forward).parameters
        self._model, self.positions = model, "position_ids" in parameters
        self.cache = next((name for name in reversed(CACHES) if name in parameters), None)
        # MiniMax refuses caches of other classes than its own if they are to be used, and uses what it is given.
        self._use = not any(map(asks_linear_cache, {type(module) for module in model.modules()}))

    def __call__(
        self, token_ids: Tensor, position_ids: Tensor, cache: Cache, *, mask: Tensor | None = None, **more: Tensor
    ) -> Tensor:
        """Return logits [batch, T, vocabulary].

        Args:
            token_ids: int64 [batch, T].
            position_ids: int64 [batch, T] or [axes, batch, T]; models without positions get none, and no mask.
            mask: of the attention.
            more: further arguments.
        """
        given = {"position_ids": position_ids} if self.positions else {}
        if mask is not None and self.positions:
            given["attention_mask"] = mask
        assert self.cache is not None
        logits: Tensor = self._model(
            input_ids=token_ids, use_cache=self._use, **{self.cache: cache}, **given, **more
        ).logits
        return logits
