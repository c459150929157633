"""Host memory that a machine's ranks take for what is not on their GPUs."""

from math import prod

from r1_cli.config import RunConfig
from r1_cli.config.root import Owner
from r1_cli.plan.batches import count_micro_batch_tokens
from r1_cli.plan.memory import Memory, compute_bytes
from r1_cli.plan.model_sizes import BYTES, ModelSizes


def find_host(config: RunConfig, memory: Memory) -> dict[str, int]:
    """Return the bytes of one machine's host memory by what they hold, without Python, torch and the data.

    Torch rounds each page-locked allocation up to a power of two. That counts for what FSDP keeps there
    (`enable_cpu_offload`) and for activations. What r1 offloads between phases lies in slabs without such loss.
    """
    actor, ref, critic = config.worker.actor, config.worker.ref, memory.critic
    found = _states_of(config, "actor", memory.weights, memory.optimizer, memory.models["actor"])
    if critic is not None:
        own = _states_of(config, "critic", critic.weights, critic.optimizer, memory.models["critic"])
        found |= {f"critic's {name}": size for name, size in own.items()}
    if ref.fsdp.enable_cpu_offload and memory.reference:
        found["reference"] = _locked(memory.models["actor"], compute_bytes(actor), config.shard_ranks)
    elif ref.offload.offload_params:
        found["reference"] = memory.reference
    text = memory.models["actor"].text
    if actor.model.enable_activation_offload and text is not None:
        tokens = count_micro_batch_tokens(config, actor.update_size) // config.sequence_ranks()
        found["activations"] = text.layers * _power_of_two(tokens * text.hidden * compute_bytes(actor))
    ranks = config.trainer.n_gpus_per_node
    return {name: ranks * size for name, size in found.items() if size}


def _states_of(config: RunConfig, owner: Owner, weights: int, optimizer: int, sizes: ModelSizes) -> dict[str, int]:
    section, found = config.trained(owner), dict[str, int]()
    if section.fsdp.enable_cpu_offload:
        trained = sizes.count_trained(section.model) / max(sizes.parameters, 1)
        locked = _locked(sizes, BYTES[section.kept_dtype], config.shard_ranks)
        return {"weights": locked, "gradients": int(trained * locked), "optimizer states": optimizer}
    if config.shares_devices and section.offload.offload_params and not config.shares_base(on_gpu=True):
        found["weights"] = weights
    if config.shares_devices and section.offload.offload_optimizer:
        found["optimizer states"] = optimizer
    return found


def _locked(sizes: ModelSizes, number: int, shards: int) -> int:
    return sum(_power_of_two(-(-prod(shape) * number // shards)) for shape in sizes.shapes.values())


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
