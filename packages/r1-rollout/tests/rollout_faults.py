"""Faults of a sync to catch: each wraps any engine, or is put into an embedded one, and names the group it hurts."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.fault import ParameterRows
from r1_rollout.lora import Adapter
from r1_rollout.names import core
from r1_rollout.types import PromptLike
from r1_rollout.weights import LocalWeights, WeightSource

Tamper = Callable[["FaultyEngine", str, Tensor], Tensor]


class ModelReference:
    """A learner for the search: a plain Hugging Face model, and its LoRA factors if that is what it sends."""

    def __init__(self, model: Any, adapter: Adapter | None = None) -> None:
        self.model, self.adapter = model, adapter
        self.base = {name: tensor.clone() for name, tensor in model.state_dict().items()} if adapter else {}
        self._merge()

    def _merge(self) -> None:
        """Put the adapter into the model, as its own forward pass would."""
        if self.adapter is None:
            return
        factors = dict(self.adapter.weights)
        for name in factors:
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
                delta = factors[name.replace(".lora_A.", ".lora_B.")] @ factors[name]
                merged = self.base[f"{module}.weight"] + self.adapter.alpha / self.adapter.rank * delta
                self.model.get_submodule(module).weight.data.copy_(merged)

    def own(self) -> dict[str, Tensor]:
        """What is trained, by name; tied tensors once."""
        if self.adapter is not None:
            return dict(self.adapter.weights)
        seen: dict[int, str] = {}
        return {
            name: tensor.detach()
            for name, tensor in self.model.state_dict(keep_vars=True).items()
            if seen.setdefault(id(tensor), name) == name
        }

    def weights(self, version: int) -> LocalWeights:
        return LocalWeights(self.own().items() if self.adapter is None else self.adapter, version)

    @torch.no_grad()
    def logprobs_of(self, prompts: Sequence[PromptLike], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        return [plain_score(self.model, p, [*r]) for p, r in zip(prompts, responses, strict=True)]

    @contextmanager
    def zeroed(self, rows: ParameterRows) -> Iterator[None]:
        own = self.own()
        kept = {name: own[name].clone() for name in rows}
        for name, which in rows.items():
            own[name][slice(None) if which is None else [*which]] = 0.0
        self._merge()
        yield
        for name, tensor in kept.items():
            own[name].copy_(tensor)
        self._merge()


@torch.no_grad()
def plain_score(model: Any, prompt: PromptLike, response: list[int]) -> list[float]:
    """The response's log-probs by one plain forward pass."""
    rotary = rotary_positions(prompt)
    after = int(rotary.max()) + 1 + torch.arange(len(response)).expand(len(rotary), -1)
    positions = torch.cat([rotary, after], dim=1)[:, None]
    logits = model(
        input_ids=torch.tensor([[*prompt.token_ids, *response]]),
        position_ids=positions if len(positions) > 1 else positions[0],
        use_cache=False,
        **prompt.model_inputs,
    ).logits[0, len(prompt.token_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def rotary_positions(prompt: PromptLike) -> Tensor:
    return prompt.position_ids[1:] if len(prompt.position_ids) > 1 else prompt.position_ids


class FaultyEngine:
    """Passes everything on to an engine, and lets a fault tamper with each tensor of a sync."""

    def __init__(self, engine: Any, tamper: Tamper) -> None:
        self.engine, self.tamper = engine, tamper
        self.first: dict[str, Tensor] = {}  # what the first sync brought
        self.latest: dict[str, Tensor] = {}
        self.syncs = 0

    @contextmanager
    def active(self, source: WeightSource) -> Iterator[None]:
        self.syncs += 1
        weights = source.tensors()
        named = weights.weights if isinstance(weights, Adapter) else weights
        self.latest = {name: tensor.clone() for name, tensor in named}
        self.first = self.first or self.latest
        changed = [(name, self.tamper(self, name, tensor)) for name, tensor in self.latest.items()]
        tampered = replace(weights, weights=changed) if isinstance(weights, Adapter) else changed
        with self.engine.active(LocalWeights(tampered, source.version)):
            yield

    def generate(self, *args: Any) -> Any:
        return self.engine.generate(*args)

    def logprobs_of(self, *args: Any) -> list[list[float]]:
        return self.engine.logprobs_of(*args)


class RenumberedEngine:
    """Counts versions on from the last that an engine has had, so that tests which begin at 0 can share it."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.first = engine, engine._latest + 1

    @contextmanager
    def active(self, source: WeightSource) -> Iterator[None]:
        with self.engine.active(LocalWeights(source.tensors(), self.first + source.version)):
            yield

    def logprobs_of(self, *args: Any) -> list[list[float]]:
        return self.engine.logprobs_of(*args)


def no_fault(engine: FaultyEngine, name: str, tensor: Tensor) -> Tensor:
    return tensor


def skips(part: str) -> Tamper:
    """Tensors with `part` in their names stay what the first sync made them."""
    return lambda engine, name, tensor: engine.first[name] if part in name else tensor


def transposes(end: str) -> Tamper:
    return lambda engine, name, tensor: tensor.T.contiguous() if name.endswith(end) else tensor


def swaps(layer: str, one: str, other: str) -> Tamper:
    """Two modules of a layer get each other's tensors."""

    def tamper(engine: FaultyEngine, name: str, tensor: Tensor) -> Tensor:
        if layer in name and f".{one}." in name:
            return engine.latest[name.replace(f".{one}.", f".{other}.")]
        if layer in name and f".{other}." in name:
            return engine.latest[name.replace(f".{other}.", f".{one}.")]
        return tensor

    return tamper


def swaps_layers(part: str) -> Tamper:
    """The first two layers get each other's tensors with `part` in their names."""

    def tamper(engine: FaultyEngine, name: str, tensor: Tensor) -> Tensor:
        if part not in name:
            return tensor
        one, other = ".layers.0.", ".layers.1."
        return engine.latest[name.replace(one, other) if one in name else name.replace(other, one)]

    return tamper


def drops_adapter(engine: FaultyEngine, name: str, tensor: Tensor) -> Tensor:
    """An engine that takes the adapter, says nothing, and adds nothing."""
    return torch.zeros_like(tensor)


def pack_head(model: Any) -> None:
    """The output layer multiplies by a copy that is made at the first use and never again, as packed kernels do."""
    packed: list[Tensor] = []

    def multiply(module: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        if not packed:
            packed.append(module.weight.detach().clone())
        return F.linear(args[0], packed[0])

    model.lm_head.register_forward_hook(multiply)


class PrefixCachingEngine(EmbeddedEngine):
    """Keeps keys and values of the prompts it has seen over a sync, which it must not."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.model = model
        self.cached: dict[tuple[int, ...], tuple[DynamicCache, Tensor]] = {}

    @torch.no_grad()
    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        return [self._score(p, [*r]) for p, r in zip(prompts, responses, strict=True)]

    def _score(self, prompt: PromptLike, response: list[int]) -> list[float]:
        rotary, key = rotary_positions(prompt), tuple(prompt.token_ids)
        if key not in self.cached:
            cache = DynamicCache()
            positions = rotary[:, None] if len(rotary) > 1 else rotary
            ids = torch.tensor([prompt.token_ids])
            out = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, **prompt.model_inputs)
            self.cached[key] = cache, out.logits[0, -1:]
        cache, last = self.cached[key]
        after = int(rotary.max()) + 1 + torch.arange(len(response)).expand(len(rotary), 1, -1)
        out = self.model(
            input_ids=torch.tensor([response]),
            position_ids=after if len(rotary) > 1 else after[0],
            past_key_values=copy.deepcopy(cache),
        )
        logits = torch.cat([last, out.logits[0, :-1]])
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


@torch.no_grad()
def train(model: nn.Module, size: float = 0.2) -> None:
    """Move every parameter, as an optimizer step does."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        scale = size * (parameter.std() if parameter.numel() > 1 and parameter.std() > 0 else 1.0)
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@dataclass(frozen=True)
class Fault:
    """A fault of the sync, and what the canary must call it."""

    group: str
    tamper: Tamper


def layer(number: int) -> str:
    return f"layers.{number}."


def faults_of_transport() -> dict[str, Fault]:
    """What any engine may suffer between the trainer's tensors and its own, for models of at least three layers."""
    return {
        "a skipped layer": Fault("layer 1", skips(layer(1))),
        "a skipped last layer": Fault("layer 2", skips(layer(2))),
        "a transposed matrix": Fault("layer 1", transposes("layers.1.self_attn.q_proj.weight")),
        "swapped q and k": Fault("layer 2", swaps(layer(2), "q_proj", "k_proj")),
        "a skipped embedding": Fault("embedding", skips("embed_tokens")),
        "a skipped norm": Fault("final norm", lambda e, n, t: e.first[n] if core(n) == "norm.weight" else t),
    }
