"""A simulated GPU: tensors that report a GPU as their device and are computed on the CPU.

Where a tensor of the one kind meets a tensor of the other, a GPU would raise an error, and so does this. Where the host
must wait for a result (`.item()`, `.tolist()`, `nonzero`, an index of booleans, a copy back), it is counted. So are the
kernels and copies that the host launches.
"""

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "shadow"
DEVICE = torch.device("privateuseone", 0)
PACKAGES = ("r1_core", "r1_cli", "r1_rollout")

aten: Any = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default,
}  # fmt: skip
INDEXING = ("aten::index", "aten::_index_put_impl_")


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of a device's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


class Shadow(Tensor):
    """A tensor of the device; `inner` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Shadow":
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self, **options: Any) -> str:
        return f"Shadow({self.inner})"

    def tolist(self) -> Any:
        _mode().waits[f"tolist at {_where()}"] += 1
        return self.inner.tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_moved(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_moved(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the shadow device's block")


class ShadowMode(TorchDispatchMode):
    """Computes what is asked of the device.

    `waits` counts where the host waited for it, `launches` what the host launched: operations that are no views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()

    @contextmanager
    def one_launch(self, name: str) -> Iterator[None]:
        """A graph, in whose block nothing may wait; it counts as one launch."""
        waits, launches = self.waits.copy(), self.launches.copy()
        yield
        if self.waits != waits:
            raise RuntimeError(f"{name} waits for the device: {dict(self.waits - waits)}")
        self.launches = launches + Counter([name])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled():
            # Its tensors cannot be wrapped, and its operations arrive before they are taken apart.
            with torch.inference_mode(False), torch.no_grad():
                if func._can_decompose():
                    with self:
                        return func.decompose(*args, **kwargs)
                return self._compute(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        on_device = any(isinstance(tensor, Shadow) for tensor in tensors)
        asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if asked is not None and asked.type == DEVICE.type:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if on_device:
            self._watch(func, args, tensors, asked)
        plain_args, plain_kwargs = tree_map_only(Tensor, _inner, (args, kwargs))
        with _disable_current_modes():
            result = func(*plain_args, **plain_kwargs)
        stays = on_device if asked is None else asked.type == DEVICE.type
        if (on_device or stays) and not _is_view(func):
            self.launches[func.name()] += 1
        if func is aten.copy_.default:
            return args[0]
        own = {id(_inner(tensor)): tensor for tensor in tensors}  # operations in place return their argument
        return tree_map_only(Tensor, lambda t: own.get(id(t), Shadow(t) if stays else t), result)

    def _watch(self, func: Any, args: Sequence[Any], tensors: Sequence[Tensor], asked: torch.device | None) -> None:
        """Count a wait. Raises RuntimeError where tensors of two devices meet."""
        name = func.name()
        if func in COPIES:
            back = asked is not None and asked.type == "cpu" if func is aten._to_copy.default else False
            if back or (func is aten.copy_.default and not isinstance(args[0], Shadow)):
                self.waits[f"copy back at {_where()}"] += 1
            return
        indexes = name.startswith(INDEXING)
        for tensor in tensors:
            index = indexes and tensor.dtype in (torch.int64, torch.bool)
            if not isinstance(tensor, Shadow) and tensor.dim() > 0 and not index:
                raise RuntimeError(f"{name}: a CPU tensor {[*tensor.shape]} meets the device's at {_where()}")
        if func in WAITS or (indexes and any(tensor.dtype == torch.bool for tensor in tensors[1:])):
            self.waits[f"{name} at {_where()}"] += 1


def _is_view(func: Any) -> bool:
    """Whether an operation returns what it is given in another shape."""
    aliases = [one.alias_info for one in func._schema.returns]
    return bool(aliases) and all(one is not None and not one.is_write for one in aliases)


_ACTIVE: list[ShadowMode] = []


def _mode() -> ShadowMode:
    return _ACTIVE[-1]


def _moved(index: Any) -> Any:
    """An index whose lists lie on the device, as torch copies them there."""
    if isinstance(index, tuple):
        return tuple(map(_moved, index))
    return torch.tensor([*index], dtype=torch.int64).to(DEVICE) if isinstance(index, list | range) else index


def _inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Shadow) else tensor


def _where() -> str:
    """The line of ours that asked, or of transformers or torch if none of ours did."""
    frames = traceback.extract_stack()[:-3]
    own = [frame for frame in frames if any(f"/{package}/" in frame.filename for package in PACKAGES)] or frames
    return f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno} {own[-1].line}"


@contextmanager
def shadow_device() -> Iterator[ShadowMode]:
    """The device, in a block. Gradients are taken by the thread that asks, so that they are seen, too."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    make = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        return made if device is None else made.to(device)

    mode = ShadowMode()
    _ACTIVE.append(mode)
    torch.tensor = tensor
    try:
        with torch.autograd.set_multithreading_enabled(False), mode:
            yield mode
    finally:
        torch.tensor = make
        _ACTIVE.pop()


def move(model: nn.Module) -> nn.Module:
    """Put a model's parameters and buffers onto the device, copied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = nn.Parameter(Shadow(parameter.detach().clone()), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Shadow(buffer.clone())
    return model
