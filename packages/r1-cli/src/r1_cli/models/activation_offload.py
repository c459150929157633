"""Keep the inputs of checkpointed layers in host memory, and copy them while the GPU computes other layers."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Copy:
    """A tensor, and the event behind the copy that fills it."""

    def __init__(self, tensor: Tensor, ready: torch.cuda.Event) -> None:
        self.tensor, self.ready = tensor, ready


class CopyStreams:
    """Copies to host memory and back on streams of their own. NOT RUN ON A GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward, self._homeward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, tensor: Tensor) -> Copy:
        """Begin to copy a tensor behind the kernels that write it; its memory is kept until the copy has ended."""
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._outward):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._outward)
        return Copy(host, self._outward.record_event())

    def to_device(self, host: Copy) -> Copy:
        """Begin to copy a tensor back, behind its copy to the host."""
        self._homeward.wait_event(host.ready)
        with torch.cuda.stream(self._homeward):
            tensor = host.tensor.to(self._device, non_blocking=True)
        return Copy(tensor, self._homeward.record_event())

    def wait_for(self, copy: Copy) -> Tensor:
        """Return the tensor of a copy. Kernels that are launched later wait until the copy is complete."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copy.ready)
        copy.tensor.record_stream(current)
        return copy.tensor


class _Saved:
    """A layer's input on the host, and the one of the layer before, which the backward pass needs next."""

    def __init__(self, copies: CopyStreams, host: Copy, before: "_Saved | None") -> None:
        self._copies, self._host = copies, host
        self._device: Copy | None = None
        self._before = None if before is None else weakref.ref(before)  # gone after the backward pass of its batch

    def prefetch(self) -> None:
        if self._device is None:
            self._device = self._copies.to_device(self._host)

    def load(self) -> Tensor:
        self.prefetch()
        assert self._device is not None
        tensor, self._device = self._copies.wait_for(self._device), None
        if self._before is not None and (before := self._before()) is not None:
            before.prefetch()
        return tensor


class ActivationOffload:
    """Calls a model's layers by their checkpoint, with their inputs in host memory until the backward pass."""

    def __init__(self, copies: CopyStreams) -> None:
        self._copies = copies
        self._last: weakref.ref[_Saved] | None = None

    def call(self, checkpoint: Callable[..., object], layer: nn.Module, *inputs: object) -> object:
        with saved_tensors_hooks(self._pack, _Saved.load):
            return checkpoint(layer, *inputs)

    def _pack(self, tensor: Tensor) -> _Saved:
        before = None if self._last is None else self._last()
        saved = _Saved(self._copies, self._copies.to_host(tensor), before)
        self._last = weakref.ref(saved)
        return saved
