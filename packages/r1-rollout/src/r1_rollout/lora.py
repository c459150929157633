"""Low-rank adapters (LoRA, arXiv 2106.09685): only the factors are sent, the engine keeps the base weights."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from r1_rollout.names import Directory, Place, adapter_part


@dataclass(frozen=True, slots=True)
class Adapter:
    """The weights of a sync where only an adapter is trained: W = base + (alpha / rank) · B · A.

    Example: `Adapter(8, 16.0, ("q_proj", "v_proj"), peft_model_state_dict.items())`
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]  # ends of module names, as in PEFT, or `all-linear`
    weights: Iterable[tuple[str, Tensor]]  # PEFT's names; A is [rank, inputs], B is [outputs, rank]


class AdapterSlot:
    """Adapters merged into a model's weights.

    The base weights of the adapted modules are kept, and each adapter is added to them: the weights are, bit for bit,
    those of the last adapter alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bases: dict[str, tuple[Tensor, Tensor]] = {}  # module: (view into the model, its values before)
        self.factors: dict[str, Tensor] = {}  # of the last sync, as they came

    def forget(self) -> None:
        self._bases.clear()
        self.factors = {}

    @torch.no_grad()
    def load(self, adapter: Adapter) -> None:
        """Replace the adapter. Raises ValueError, with nothing changed, if it is incomplete or binds to nothing."""
        sent = dict(adapter.weights)
        factors = _pair(replace(adapter, weights=sent.items()))
        places = _bind(self._model, adapter, factors)
        for view, base in self._bases.values():
            view.copy_(base)
        for name in self._bases.keys() - factors.keys():
            del self._bases[name]
        scale = adapter.alpha / adapter.rank
        for module, (a, b) in factors.items():
            view = places[module].rows(b.shape[0])
            _, base = self._bases.setdefault(module, (view, view.clone()))
            view.copy_(base.float() + scale * (b.to(view.device).float() @ a.to(view.device).float()))
        self.factors = {name: tensor.detach().clone() for name, tensor in sent.items()}


class SideSlot:
    """Adapters beside read-only weights: a module computes W x + (alpha / rank) · B (A x).

    The factors are copies in the precision of the weights, so they stay those of the last sync.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self.factors: dict[str, Tensor] = {}  # of the last sync, under the names that they came by

    def forget(self) -> None:
        raise ValueError("the engine's weights are the learner's own: it takes adapters only")

    @torch.no_grad()
    def load(self, adapter: Adapter) -> None:
        """Replace the adapter. Raises as `AdapterSlot.load`, or if it adapts something other than a linear layer."""
        sent = dict(adapter.weights)
        factors = _pair(replace(adapter, weights=sent.items()))
        places = _bind(self._model, adapter, factors)
        modules = {name: _linear_of(self._model, place) for name, place in places.items()}
        own = {name: _copied(tensor, like=next(self._model.parameters())) for name, tensor in sent.items()}
        copies = {id(tensor): own[name] for name, tensor in sent.items()}
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.factors = [], own
        for name, (a, b) in factors.items():
            first = places[name].first_row
            rows = None if places[name].part is None else slice(first, first + b.shape[0])
            product = partial(_add_product, copies[id(a)], copies[id(b)], adapter.alpha / adapter.rank, rows)
            self._hooks.append(modules[name].register_forward_hook(product))


def _copied(factor: Tensor, *, like: Tensor) -> Tensor:
    return factor.detach().to(like.device, like.dtype, copy=True)


def _add_product(
    a: Tensor, b: Tensor, scale: float, rows: slice | None, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """A forward hook that adds scale · B (A x) to some rows of a linear layer's output."""
    down = nn.functional.linear(inputs[0], a)
    if rows is None:
        return torch.addmm(output.flatten(0, -2), down.flatten(0, -2), b.T, alpha=scale).view(output.shape)
    output[..., rows].add_(nn.functional.linear(down, b), alpha=scale)
    return output


def _linear_of(model: nn.Module, place: Place) -> nn.Linear:
    module = model.get_submodule(place.name.removesuffix(".weight"))
    if not isinstance(module, nn.Linear):
        raise ValueError(f"the adapter of {place.name} is for a {type(module).__name__}, only linear layers take one")
    return module


def _pair(adapter: Adapter) -> dict[str, tuple[Tensor, Tensor]]:
    if adapter.rank < 1:
        raise ValueError(f"the adapter has rank {adapter.rank}, it must be at least 1")
    if isinstance(adapter.target_modules, str):
        raise ValueError(f"target_modules is a string: give a tuple, ({adapter.target_modules!r},)")
    sides: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    for name, tensor in adapter.weights:
        part = adapter_part(name)
        if part is None:
            raise ValueError(f"{name} is no factor of a LoRA adapter (…lora_A.weight or …lora_B.weight)")
        module, side = part
        axis = 0 if side == "A" else 1
        if tensor.ndim != 2 or tensor.shape[axis] != adapter.rank:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, axis {axis} must be the rank, {adapter.rank}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: got {tensor.dtype}, a factor has floating-point numbers")
        sides[side][module] = tensor
    if not sides["A"] and not sides["B"]:
        raise ValueError(f"the adapter for {_listed(adapter.target_modules)} holds no weights")
    if lone := sides["A"].keys() ^ sides["B"].keys():
        raise ValueError(f"the adapter has only one factor of {_listed(sorted(lone))}")
    return {module: (a, sides["B"][module]) for module, a in sides["A"].items()}


def _bind(model: nn.Module, adapter: Adapter, factors: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Place]:
    directory = Directory(model.state_dict(keep_vars=True))
    found = {module: directory.find(f"{module}.weight", b.shape[0]) for module, (_, b) in factors.items()}
    places = {module: place for module, place in found.items() if place is not None}
    if unbound := [module for module in factors if module not in places]:
        raise ValueError(
            f"the adapter binds to nothing: {len(unbound)} of its {len(factors)} modules are not in the engine's "
            f"{type(model).__name__}: {_listed(unbound)}"
        )
    for module, (a, b) in factors.items():
        view, shape = places[module].rows(b.shape[0]), [b.shape[0], a.shape[1]]
        if list(view.shape) != shape or places[module].first_row < 0:
            raise ValueError(f"the adapter of {module} makes {shape}, the engine's weight is {list(view.shape)}")
    for target in adapter.target_modules:
        if target != "all-linear" and not any(f".{module}".endswith(f".{target}") for module in factors):
            raise ValueError(f"the adapter's target module {target} binds to nothing: it has no weights for it")
    return places


def _listed(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
