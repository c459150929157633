"""Weight sync into a running vLLM: by reference in this process, else by CUDA IPC, files, or the sender's calls.

A layer is loaded as soon as its tensors are there, so the peak is the model plus one layer or one bucket.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from r1_rollout.fault import group_of
from r1_rollout.names import FUSED, Directory, unwrapped
from r1_rollout.private_folder import PrivateFolder
from r1_rollout.transports import direct
from r1_rollout.transports.folder import read_shards, write_shards
from r1_rollout.types import JsonObject
from r1_rollout.weights import DirectWeights, Shapes, TransferCall, buckets, known, note, require_same

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.worker.worker_base import WorkerBase

BUCKET = 1 << 30  # bytes on each GPU, or of a file


def bring(
    llm: "LLM",
    weights: Iterable[tuple[str, Tensor]] | DirectWeights,
    came: Shapes,
    first: Shapes,
    dtype: torch.dtype,
    *,
    workers: int,
    on_cpu: bool,
) -> None:
    """Load all weights by the transport that suits. Raises WeightsError or ValueError if they are not the model's.

    Args:
        came, first: see `weights.known`.
        dtype: of weights that are sent to other processes.
    """
    llm.collective_rpc(prepare_loading)
    if isinstance(weights, DirectWeights):
        receive(llm, weights.calls(), came, first)
        if workers == 1:
            require_all(llm, came, on_cpu=on_cpu)
    elif workers == 1:
        reload(llm, known(weights, came, first), came, on_cpu=on_cpu)
    elif on_cpu:
        push(llm, known(weights, came, first), dtype)
    else:
        send(llm, known(weights, came, first), dtype)


def reload(llm: "LLM", weights: Iterable[tuple[str, Tensor]], came: Shapes, *, on_cpu: bool) -> None:
    """Load `weights` into the engine of this process; they are read one by one, and cast as they are copied.

    Raises:
        ValueError: a name or shape is not the model's, or a weight is missing, for which vLLM itself would keep the old
            values. The engine's weights are then a mixture.
    """
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    except BaseException:
        llm.collective_rpc(drop_unfinished)
        raise
    require_all(llm, came, on_cpu=on_cpu)


def require_all(llm: "LLM", came: Shapes, *, on_cpu: bool) -> None:
    if on_cpu:
        llm.apply_model(repack_heads)
    (parameters,) = llm.apply_model(named_parameters)
    given = {name: shape[0] if shape else 1 for name, shape in came.items()}
    if absent := absent_names(parameters, given):
        shown = ", ".join(absent[:5]) + (", …" if len(absent) > 5 else "")
        raise ValueError(f"{len(absent)} weights of the engine's model were not given: {shown}")


def drop_unfinished(worker: "WorkerBase") -> None:
    """Drop what a failed load has left in a worker: vLLM 0.32 would count it for the next load."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with suppress(Exception), set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.get_model(), worker.model_config)


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def absent_names(parameters: Mapping[str, Tensor], given: Mapping[str, int]) -> list[str]:
    """Return the weights of the model that were not given, by their names in a checkpoint.

    Groups (`fault.group_of`) that vLLM keeps in its own layout, such as experts, are not checked.

    Args:
        given: names that were given, each with the tensor's rows.
    """
    directory, came, elsewhere = Directory(parameters), set(), set()
    for name, rows in given.items():
        if place := directory.find(name, rows):
            came.add((place.name, place.part))
        else:
            elsewhere.add(group_of(name))
    absent = []
    for name in parameters:
        if (name, None) not in came and group_of(name) not in elsewhere:
            fused = next((word for word in FUSED if f".{word}." in name), None)
            parts = FUSED[fused] if fused else (None,)
            absent += [
                unwrapped(name.replace(fused, part) if fused and part else name)
                for part in parts
                if (name, part) not in came
            ]
    return absent


def empty_cache(worker: "WorkerBase") -> None:
    """Zero a worker's KV cache: kernels multiply masked values by zero, and NaN by zero is NaN."""
    for tensor in worker.model_runner.kv_caches:
        tensor.zero_()


def repack_heads(model: nn.Module) -> None:
    """Let the output layer pack its weight again, as a packed copy serves on CPUs.

    vLLM 0.32 packs a layer when weights of its name are loaded; a head that shares the embedding's weight gets none.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def prepare_loading(worker: "WorkerBase") -> None:
    """Let a worker's model load the learner's names, and mixtures of experts its layout, again and again.

    vLLM transposes experts of families whose files have them as [in, out]; a learner's are [out, in]. On CPUs vLLM 0.32
    packs the weights of its first load only, and mistakes later ones for packed. It knows modules by the names of the
    families' files, which transformers renames in some (Mixtral's `block_sparse_moe` is the learner's `mlp`).
    """
    model: Any = worker.get_model()
    renamings = find_renamings(model, worker.model_config.hf_text_config.model_type)
    if "load_weights" not in vars(model) and (renamings or any(map(_routes, model.modules()))):
        model.load_weights = partial(load_renamed, model, model.load_weights, renamings)
    for module in model.modules():
        if getattr(module, "is_fused_checkpoint_transposed", False):
            module.is_fused_checkpoint_transposed = False
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).is_cpu:
            method.process_weights_after_loading = partial(_begin_anew, method)


def find_renamings(model: nn.Module, model_type: str) -> list[tuple[str, str]]:
    """Return parts of the learner's names, and what they are in the files, where only the latter are the engine's."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    # Towers of CLIP and SigLIP lie in a container, which transformers has left out of its names.
    towers = [name for name, module in model.named_modules() if [*dict(module.named_children())] == ["vision_model"]]
    found = [(f"{name}.", f"{name}.vision_model.") for name in towers if name]
    names = [f".{name}." for name, _ in model.named_modules()]
    for renaming in get_checkpoint_conversion_mapping(model_type) or ():
        if isinstance(renaming, WeightRenaming) and len(renaming.source_patterns) == 1:
            (theirs,), (ours,) = renaming.source_patterns, renaming.target_patterns
            if any(theirs in name for name in names) and not any(ours in name for name in names):
                found.append((ours, theirs))
    if any(_routes(module) and module.ckpt_gate_proj_name == "w1" for module in model.modules()):
        found += [(".experts.gate_up_proj", ".experts.w13"), (".experts.down_proj", ".experts.w2")]
    return found


def load_renamed(
    model: nn.Module,
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    renamings: list[tuple[str, str]],
    weights: Iterable[tuple[str, Tensor]],
) -> Any:
    """Load weights. Raises ValueError if experts are among them that the engine has not taken, and said nothing."""
    came = set[str]()  # layers with experts

    def renamed(name: str) -> str:
        for ours, theirs in renamings:
            name = name if theirs in name else name.replace(ours, theirs)
        if ".experts." in name:
            came.add(group_of(name))
        return name

    loaded = load((renamed(name), tensor) for name, tensor in weights)
    if stale := find_stale_experts(model, came):
        raise ValueError(
            f"vLLM keeps the old experts of {stale[0]} and {len(stale) - 1} other layers: its loader of this family is "
            "for a first load only; set worker.rollout.name=embedded"
        )
    return loaded


def find_stale_experts(model: nn.Module, came: Collection[str]) -> list[str]:
    """Return which of these layers (`fault.group_of`) have experts that none of a reload's weights has reached.

    vLLM 0.32 keeps the old weights of a layer whose parameters were not given to their loaders, with a warning.
    """
    if not came:
        return []
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    stale = []
    for name, module in model.named_modules():
        info = LAYERWISE_INFO.get(module) if _routes(module) else None
        if info is not None and info.can_load() and info.load_numel_total and not info.load_numel:
            stale.append(group_of(f"{name}.weight"))
    return [layer for layer in stale if layer in came]


def _routes(module: Any) -> bool:
    return hasattr(module, "ckpt_gate_proj_name")


def _begin_anew(method: Any, layer: nn.Module) -> None:
    method.moe_kernel = None  # by which it knows a later load from the first
    type(method).process_weights_after_loading(method, layer)


def push(llm: "LLM", weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    with PrivateFolder("r1-weights-") as place:
        folder = place / "shards"
        write_shards(weights, folder, BUCKET, dtype)
        loaded = llm.collective_rpc(load_folder, args=(str(folder),))
    for rank, (_, error) in enumerate(loaded):
        if error:
            raise ValueError(f"worker {rank}: {error}")


def load_folder(worker: "WorkerBase", folder: str) -> tuple[int, str]:
    """Load the files of `folder` in a worker's process; return how many tensors there were, and the error, or "".

    If several workers raised, vLLM 0.32 would raise the first error and take the others for answers to its next call.
    """
    tensors = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal tensors
        for named in read_shards(folder):
            tensors += 1
            yield named

    try:
        worker.reload_weights(weights_iterator=counted())
        repack_heads(worker.get_model())
    except Exception as error:
        drop_unfinished(worker)
        return tensors, f"{type(error).__name__}: {error}"
    return tensors, ""


def send(llm: "LLM", weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Send `weights` to workers in other processes through vLLM's weight transfer (its backend `ipc`).

    Each bucket is copied to every GPU and read there by its worker. NOT TESTED on GPUs: tests check only `describe`.
    """
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    llm.init_weight_transfer_engine({"init_info": {"packed": False}})
    llm.start_weight_update()
    try:
        for bucket in buckets(weights, BUCKET, dtype):
            copies = [[tensor.to(device).contiguous() for _, tensor in bucket] for device in devices]
            for device in devices:
                torch.cuda.synchronize(device)
            llm.update_weights({"update_info": describe(bucket, devices, copies)})
            del copies  # the workers have read them
    except BaseException:
        with suppress(Exception):  # an update that is left open would be the end of the next one
            llm.finish_weight_update()
        raise
    llm.finish_weight_update()


def receive(llm: "LLM", calls: Iterable[TransferCall], came: Shapes, first: Shapes) -> None:
    """Make a sender's calls of vLLM's weight transfer.

    Raises:
        WeightsError: a name or shape is not that of the first sync.
        ValueError: a worker refuses a tensor. The engine's weights are then a mixture.
    """
    try:
        for call in calls:
            if call.verb == "init_weight_transfer_engine":
                llm.shutdown_weight_transfer_engine()  # leaves the group of a sender that broke off
            if call.verb == "update_weights":
                info = call.request["update_info"]
                for name, shape in zip(info["names"], info["shapes"], strict=True):
                    note(name, tuple(shape), came, first)
            getattr(llm, call.verb)(*([call.request] if call.request else []))
        require_same(first, came)
    except BaseException:
        with suppress(Exception):  # vLLM has closed an update that failed
            llm.finish_weight_update()
        llm.collective_rpc(drop_unfinished)
        raise


def describe(bucket: list[tuple[str, Tensor]], devices: list[torch.device], copies: list[list[Tensor]]) -> JsonObject:
    from torch.multiprocessing.reductions import reduce_tensor

    names = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    return direct.describe(bucket) | {
        "ipc_handles": [
            {name: reduce_tensor(copy)[1] for name, copy in zip(names, row, strict=True)}
            for row in zip(*copies, strict=True)
        ]
    }
