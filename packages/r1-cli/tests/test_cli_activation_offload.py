"""Activations in host memory: the order of copies, and what waits for what. No GPU is needed."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from r1_cli.models.activation_offload import ActivationOffload, Copy, CopyStreams

LAYERS = 4


class LateCopies:
    """Copies that come when they are waited for, and no sooner. `log` has what happened to which layer's input."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.layers: list[Tensor] = []

    def to_host(self, tensor: Tensor) -> Copy:
        self.log.append(("out", number := len(self.layers)))
        self.layers.append(tensor.detach().clone())
        return Copy(torch.tensor(number), None)  # type: ignore[arg-type]

    def to_device(self, host: Copy) -> Copy:
        number = int(host.tensor)
        self.log.append(("back", number))
        return Copy(torch.full_like(self.layers[number], torch.nan), number)  # type: ignore[arg-type]

    def wait_for(self, copy: Copy) -> Tensor:
        number: int = copy.ready  # type: ignore[assignment]
        self.log.append(("wait", number))
        return copy.tensor.copy_(self.layers[number])


def gradients(layers: list[nn.Module], call: Callable[..., Any], seed: int) -> list[Tensor]:
    hidden = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    inputs = [hidden]
    for layer in layers:
        hidden = call(layer, hidden)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return [*torch.autograd.grad(hidden.square().sum(), [*inputs, *parameters])]


def test_the_input_of_the_layer_before_is_fetched_while_a_layer_is_computed() -> None:
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(LAYERS)]
    save = partial(checkpoint, use_reentrant=False)
    copies = LateCopies()
    offload = ActivationOffload(copies)
    for batch in range(2):
        copies.log.clear()
        found = gradients(layers, partial(offload.call, save), batch)
        for ours, plain in zip(found, gradients(layers, lambda layer, hidden: layer(hidden), batch), strict=True):
            assert torch.equal(ours, plain)
        first = batch * LAYERS
        outward = [("out", number) for number in range(first, first + LAYERS)]
        homeward = [("back", first + LAYERS - 1)]
        for number in reversed(range(first, first + LAYERS)):
            homeward += [("wait", number), *([("back", number - 1)] if number > first else [])]
        assert copies.log == outward + homeward, "none of the batch before is fetched again"


def test_a_copy_waits_for_what_it_reads_and_memory_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    names = iter(("outward", "homeward"))
    current = ["compute"]

    class Stream:
        def __init__(self, device: Any = None, name: str = "") -> None:
            self.name = name or next(names)

        def wait_stream(self, other: "Stream") -> None:
            log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: str) -> None:
            log.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            log.append(f"{self.name} records")
            return f"the event of {self.name}"

    @contextmanager
    def stream(chosen: Stream) -> Any:
        current[0] = chosen.name
        yield
        current[0] = "compute"

    compute, plain = Stream(name="compute"), torch.empty
    for name, fake in {"Stream": Stream, "stream": stream, "current_stream": lambda device: compute}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: plain(*args, **options))
    monkeypatch.setattr(Tensor, "record_stream", lambda _, chosen: log.append(f"memory is kept for {chosen.name}"))
    for name in ("copy_", "to"):
        right = getattr(Tensor, name)

        def logged(tensor: Tensor, *args: Any, right: Any = right, **options: Any) -> Any:
            assert options == {"non_blocking": True}
            log.append(f"copy on {current[0]}")
            return right(tensor, *args, **options)

        monkeypatch.setattr(Tensor, name, logged)
    copies, given = CopyStreams(torch.device("cpu")), torch.arange(6.0).view(2, 3)
    found = copies.wait_for(copies.to_device(copies.to_host(given)))
    monkeypatch.undo()
    assert found.tolist() == given.tolist()
    assert log == [
        "outward waits for compute", "copy on outward", "memory is kept for outward", "outward records",
        "homeward waits for the event of outward", "copy on homeward", "homeward records",
        "compute waits for the event of homeward", "memory is kept for compute",
    ]  # fmt: skip
