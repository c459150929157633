"""Record and replay which experts a mixture's routers choose (R3, arXiv 2510.11370).

An engine records the experts of each token, and the learner computes the token with the same ones. Its gate weights
come from its own router, so that gradients reach the router.

Every router of transformers chooses with one `torch.topk` over the scores of all experts, and derives its weights from
what that returns. So the seam is that call: inside a block of experts, its indices are recorded or replaced, and its
values gathered at the replaced indices. No family is named. A family whose routers choose in another way is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from r1_rollout.tokens import setting

# What families call the number of their routed experts.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOICES = (torch.topk, Tensor.topk)
Experts: TypeAlias = NDArray[Any]  # uint8 or int16 [tokens, routers, k]


class RoutingError(ValueError):
    """A mixture whose routers cannot be recorded or replayed, or a record of another model."""


def count_experts(config: Any) -> int:
    """Return the number of routed experts of a layer, 0 without any."""
    text = config.get_text_config()
    counts = [setting(text, name) for name in COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def unrouted(dtype: torch.dtype) -> int:
    """Return the number that stands for the experts of a token without a record; its router chooses by itself."""
    return torch.iinfo(dtype).max


def go_on(before: Experts | None, now: Experts) -> Experts:
    """Return the record of a conversation after a further turn, whose record covers all tokens before it, too.

    Tokens that were recorded in an earlier turn keep their experts: their answers were sampled with these.
    """
    if before is None:
        return now
    known = len(before) - 1  # the last token's were unknown
    return np.concatenate([before[:known], now[known:]])


def fill_up(record: Experts, length: int) -> Experts:
    """Return a record of `length` tokens; those behind it have none."""
    missing = np.full((length - len(record), *record.shape[1:]), np.iinfo(record.dtype).max, record.dtype)
    return np.concatenate([record, missing])


class Routing:
    """The routers of a model, in the order of its layers.

    A record is uint8 (int16 with more than 255 experts), [tokens, routers, k] in the order of the flattened input.
    """

    def __init__(self, model: nn.Module, experts: int) -> None:
        self.experts, self._name = experts, type(model).__name__
        self.dtype = torch.uint8 if experts <= unrouted(torch.uint8) else torch.int16
        self._choice: Tensor | None = None  # to replay
        self._counted: Tensor | None = None  # tokens whose experts are counted
        self._record: dict[int, Tensor] | None = None
        self._counts: dict[int, Tensor] = {}
        self._open: dict[int, TorchFunctionMode] = {}
        blocks = [block for block in model.modules() if any(_holds(child, experts) for child in block.children())]
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, number))
            block.register_forward_hook(partial(self._leave, number), always_call=True)
        self.routers = len(blocks)

    @classmethod
    def of(cls, model: Any) -> "Routing | None":
        """Return the model's routing, which is attached to it as `routing`; None if it is no mixture of experts."""
        if (known := vars(model).get("routing")) is not None:
            return known
        if not (experts := count_experts(model.config)):
            return None
        model.routing = cls(model, experts)  # read by `r1_core.learner.token_model`
        return model.routing

    # --- of a forward pass ---------------------------------------------------------------------------------------

    @contextmanager
    def replaying(self, choice: Tensor | None, counted: Tensor | None = None) -> Iterator[None]:
        """Let the routers choose recorded experts inside.

        Args:
            choice: a record of the input; None: they choose by themselves.
            counted: int64 [T], tokens whose experts `take_counts` counts; None: none.

        Raises:
            RoutingError: the record has other routers, or a router did not choose as others do.
        """
        if choice is not None and choice.shape[1] != self.routers:
            raise RoutingError(
                f"{self._name} has {self.routers} layers of experts, and the recorded choices {choice.shape[1]}"
            )
        with self._set(choice, counted, {} if choice is not None else None):
            yield
            if choice is not None:
                self._stack()

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Record inside. Yields what returns the record of the last forward pass; it raises as `replaying`."""
        with self._set(self._choice, None, {} if self._record is None else self._record):
            yield self._stack

    def keep(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for a checkpointed part and its recomputation, which replays what it replays now.

        This is a `context_fn` of `torch.utils.checkpoint`.
        """
        return nullcontext(), self._set(self._choice, None, None)

    def take_counts(self) -> Tensor | None:
        """Return how many of the counted tokens chose each expert since the last call, int64 [routers, experts].

        None if no tokens were counted, or not by all routers.
        """
        counts, self._counts = self._counts, {}
        if not counts or len(counts) < self.routers:
            return None
        return torch.stack([counts[number] for number in range(self.routers)])

    @contextmanager
    def _set(self, choice: Tensor | None, counted: Tensor | None, record: dict[int, Tensor] | None) -> Iterator[None]:
        before = self._choice, self._counted, self._record
        self._choice, self._counted, self._record = choice, counted, record
        try:
            yield
        finally:
            self._choice, self._counted, self._record = before

    def _stack(self) -> Tensor:
        record = self._record or {}
        silent = self.routers - len(record)
        if silent or not self.routers or len({one.shape for one in record.values()}) > 1:
            reason = f"{silent} of its {self.routers} layers of experts choose by no top-k over all experts"
            if not self.routers:
                reason = "its experts are no tensors [experts, …] of a layer"
            elif not silent:
                reason = "its layers choose different numbers of experts"
            raise RoutingError(f"the routers of {self._name} cannot be recorded or replayed: {reason}")
        return torch.stack([record[number] for number in range(self.routers)], dim=1)

    # --- of a layer ------------------------------------------------------------------------------------------------

    def _enter(self, number: int, block: nn.Module, args: Any) -> None:
        if self._choice is not None or self._counted is not None or self._record is not None:
            self._open[number] = _Choosing(partial(self._choose, number))
            self._open[number].__enter__()

    def _leave(self, number: int, block: nn.Module, args: Any, output: Any) -> None:
        if (mode := self._open.pop(number, None)) is not None:
            mode.__exit__(None, None, None)

    def _choose(self, number: int, found: Any, scores: Tensor) -> Any:
        """Return what `torch.topk` of scores is to return, given what it would."""
        if scores.ndim != 2 or scores.shape[1] < self.experts:
            return found  # of groups of experts
        values, chosen = found
        if self._choice is not None:
            given = self._choice[:, number]
            if given.shape != chosen.shape:
                raise RoutingError(
                    f"{self._name} chooses experts {list(chosen.shape)}, [tokens, k], and the record has "
                    f"{list(given.shape)}"
                )
            chosen = torch.where(given == unrouted(given.dtype), chosen, given.long())
            values = scores.gather(1, chosen)
        if self._record is not None:
            self._record[number] = chosen.to(self.dtype)
        if self._counted is not None:
            counts = self._counts.setdefault(number, chosen.new_zeros(scores.shape[1]))
            own = chosen.index_select(0, self._counted).flatten()
            counts.index_add_(0, own, torch.ones_like(own))
        return torch.return_types.topk((values, chosen))


class _Choosing(TorchFunctionMode):
    def __init__(self, choose: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self._choose = choose

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return self._choose(found, args[0]) if func in _CHOICES else found


def _holds(module: nn.Module, experts: int) -> bool:
    """Whether a module holds the weights of all experts, [experts, …]."""
    own = module.parameters(recurse=False)
    return not isinstance(module, nn.modules.conv._ConvNd) and any(p.ndim == 3 and p.shape[0] == experts for p in own)


@torch.no_grad()
def require_routing(model: Any, device: torch.device | None = None) -> Routing:
    """Return the model's routing after a forward pass of two tokens, recorded and then replayed with other experts.

    Raises RoutingError if the model is no mixture of experts, or if its routers cannot be recorded and replayed.
    """
    if (routing := Routing.of(model)) is None:
        raise RoutingError(f"{type(model).__name__} is no mixture of experts, so there are no routers to replay")
    inputs = {"input_ids": torch.zeros(1, 2, dtype=torch.int64, device=device or model.device), "use_cache": False}
    with routing.recording() as record:
        model(**inputs)
        own = record().long()
    other = ((own + 1) % routing.experts).to(routing.dtype)
    with routing.replaying(other), routing.recording() as record:
        model(**inputs)
        if not torch.equal(record(), other):
            raise RoutingError(f"the routers of {type(model).__name__} do not take the recorded choice")
    return routing
