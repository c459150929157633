"""A learner's checkpoint: weights, optimizer state and counters, the same files for any number of ranks."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from r1_core.disk import write_text
from r1_core.learner.parallel import Parallel, named_state
from r1_core.learner.tensor_files import (
    ADAPTER,
    cut,
    find_tensors,
    indices,
    largest_share,
    raise_together,
    read_tensors,
    visit_files,
    write_tensors,
)
from r1_core.learner.tensor_files import save as save_tensors

NUMBERS_FILE = "learner.json"
TEACHER = "teacher"  # the stem of the files of an `OwnTeacher`


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The adapter on a frozen base model, such as LoRA (arXiv 2106.09685). Only it is trained, saved and synced.

    Example: `Adaptation({"layers.0.q_proj.lora_A.default.weight": "base_model.model.layers.0.q_proj.lora_A.weight"},
    switched_off, {"adapter_config.json": "{…}"}, {"name": "Qwen/Qwen2.5-0.5B", "digest": "9f…"})`.
    """

    names: Mapping[str, str]  # name in a checkpoint by state-dict name
    off: Callable[[], AbstractContextManager[None]]  # context that disables the adapter
    files: Mapping[str, str]  # further text files of a checkpoint, by name
    base: Mapping[str, str]  # identifies the base model; loading compares its `digest`

    def state(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        own = dict(model.named_parameters())
        for name in self.names:
            yield name, own[name]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a learner's checkpoint in host memory: the files that this rank writes."""

    texts: Mapping[str, str]  # by the file's name
    tensors: Mapping[str, dict[str, Tensor]]  # by the file's name, then their own

    def write(self, folder: Path) -> None:
        """Write the files. Needs no other rank, so any thread may call it.

        Raises OSError if the disk is full, or the folder is not writable.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in self.texts.items():
            write_text(folder / file, text)
        for file, tensors in self.tensors.items():
            save_tensors(tensors, folder / file)


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    numbers: Mapping[str, Any],
    parallel: Parallel,
    file_bytes: int,
    adaptation: Adaptation | None = None,
    teacher: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `model…safetensors`, `optimizer…safetensors` (if there is an optimizer) and `learner.json`, without pickle.

    With an adaptation, writes instead its files and one `adapter_model.safetensors`, because peft and vLLM expect one.
    All ranks must call this. Files are flushed but not atomic: write to a temporary folder, then rename it.

    Args:
        numbers: further contents of `learner.json`.
        file_bytes: the size above which a part is split into several files.
        teacher: further tensors, of a policy that teaches itself.

    Raises:
        OSError: on all ranks, if the disk is full or the folder is not writable.
    """
    parts, texts = contents(model, optimizer, numbers, adaptation, teacher)
    failure: OSError | None = None
    if parallel.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in texts.items():
                write_text(folder / file, text)
        except OSError as error:
            failure = error
    raise_together(failure, parallel)
    write_tensors(folder, parts, parallel, file_bytes)


def snapshot(
    model: nn.Module,
    optimizer: Optimizer | None,
    numbers: Mapping[str, Any],
    parallel: Parallel,
    file_bytes: int,
    adaptation: Adaptation | None = None,
    teacher: Mapping[str, Tensor] | None = None,
    max_bytes: int | None = None,
) -> Snapshot | None:
    """Copy what `save` writes; None on all ranks if one needs more than `max_bytes`. All ranks must call this."""
    parts, texts = contents(model, optimizer, numbers, adaptation, teacher)
    plan = {stem: cut(stem, tensors, file_bytes) for stem, tensors in parts.items()}
    if max_bytes is not None and largest_share(plan, parallel.world) > max_bytes:
        return None
    held: dict[str, dict[str, Tensor]] = {}
    visit_files(parts, plan, parallel, held.__setitem__, copy=True)
    return Snapshot(texts | indices(plan) if parallel.rank == 0 else {}, held)


def contents(
    model: nn.Module,
    optimizer: Optimizer | None,
    numbers: Mapping[str, Any],
    adaptation: Adaptation | None,
    teacher: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Return a checkpoint's tensors by file stem, and the texts of its other files."""
    stem, tensors = saved_tensors(model, adaptation)
    parts, state = {stem: tensors}, dict(numbers)
    if adaptation is not None:
        state["base"] = dict(adaptation.base)
    if optimizer is not None:
        parts["optimizer"], state["optimizer"] = optimizer_state(model, optimizer)
        if teacher:
            parts[TEACHER] = dict(teacher)
    return parts, {NUMBERS_FILE: json.dumps(state) + "\n", **({} if adaptation is None else adaptation.files)}


def load_model(folder: Path, model: nn.Module, adaptation: Adaptation | None = None) -> None:
    """Copy the weights that `save` wrote into the model's parameters and persistent buffers, sharded or not.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a tensor is missing, unknown or of another shape, a file is truncated, or the base is another.
    """
    if adaptation is not None:
        require_base(folder, adaptation)
    stem, tensors = saved_tensors(model, adaptation)
    read_tensors(find_tensors(folder, stem), tensors, folder)


def load_teacher(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights of a policy that teaches itself. Raises as `load_model`."""
    read_tensors(find_tensors(folder, TEACHER), weights, folder)


def saved_tensors(model: nn.Module, adaptation: Adaptation | None) -> tuple[str, dict[str, Tensor]]:
    if adaptation is None:
        return "model", dict(named_state(model))
    return ADAPTER, {adaptation.names[name]: tensor for name, tensor in adaptation.state(model)}


def require_base(folder: Path, adaptation: Adaptation) -> None:
    if not (folder / NUMBERS_FILE).is_file():
        raise FileNotFoundError(f"{folder} has no {NUMBERS_FILE}; is it a checkpoint?")
    base = _read_numbers(folder).get("base")
    if base is None:
        raise ValueError(f"{folder} holds a whole model, and what is trained here is an adapter: start from it instead")
    if base["digest"] != adaptation.base["digest"]:
        raise ValueError(
            f"{folder} holds an adapter of {base['name']} ({base['digest'][:12]}…), but the weights of "
            f"{adaptation.base['name']} are others ({adaptation.base['digest'][:12]}…)"
        )


def load_numbers(folder: Path) -> dict[str, Any]:
    """Read `learner.json`.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it is truncated, or was saved without an optimizer.
    """
    state = _read_numbers(folder)
    if "optimizer" not in state:
        raise ValueError(f"{folder} holds no optimizer state (it was saved with model_only); load it with model_only")
    return state


def _read_numbers(folder: Path) -> dict[str, Any]:
    path = folder / NUMBERS_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is truncated or not JSON ({error}); use another checkpoint") from error
    return state


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Return the optimizer's state: tensors `exp_avg.<parameter>` and numbers {"step": {<parameter>: 12.0}}."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, float]] = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if value.dim() == 0:
                numbers.setdefault(key, {})[name] = value.item()
            else:
                tensors[f"{key}.{name}"] = value
    return tensors, numbers


def load_optimizer(
    folder: Path, model: nn.Module, optimizer: Optimizer, numbers: Mapping[str, Mapping[str, float]]
) -> None:
    """Restore what `optimizer_state` returned; `numbers` are from `learner.json`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a tensor belongs to no trained parameter, is missing or of another shape, or a file is truncated.
    """
    params = dict(model.named_parameters())
    order = [param for group in optimizer.param_groups for param in group["params"]]
    trained = {id(param) for param in order}
    stored = find_tensors(folder, "optimizer")
    state: dict[str, dict[str, Tensor]] = {}
    for full_name in stored:
        key, _, name = full_name.partition(".")
        if name not in params or id(params[name]) not in trained:
            raise ValueError(f"{folder}: optimizer tensor {full_name!r} belongs to no trained parameter of this model")
        state.setdefault(name, {})[key] = torch.empty_like(params[name].detach())
    stepped = {name for values in numbers.values() for name in values} | set(state)
    keys = {key for values in state.values() for key in values}
    targets = {f"{key}.{name}": tensor for name, values in state.items() for key, tensor in values.items()}
    if missing := sorted({f"{key}.{name}" for key in keys for name in stepped} - set(targets)):
        raise ValueError(f"{folder}: the optimizer's tensor {missing[0]!r} is missing ({len(missing)} in all)")
    read_tensors(stored, targets, folder)
    for key, values in numbers.items():
        for name, number in values.items():
            state.setdefault(name, {})[key] = torch.tensor(number)
    # The optimizer's own dict numbers parameters; names make the file independent of their order.
    names = {id(param): name for name, param in params.items()}
    own = optimizer.state_dict()
    own["state"] = {i: state[names[id(param)]] for i, param in enumerate(order) if names[id(param)] in state}
    optimizer.load_state_dict(own)
