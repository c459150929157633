"""Checkpoints in EasyR1's and veRL's layout, written by torch's own FSDP in gloo ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core_models import TEXT
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM

KINDS = ("FSDP2", "FSDP2 with replicas", "FSDP1 with a mesh", "FSDP1")


def make_model(dtype: torch.dtype, *, tied: bool) -> Any:
    """A model of which two ranks have uneven shards: 61 tokens."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**{**TEXT, "vocab_size": 61}, tie_word_embeddings=tied)).to(dtype)


def add_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    for name, param in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    return adapted


def write(actor: Path, kind: str, dtype: torch.dtype, tied: bool, adapted: bool = False) -> None:
    """Shard the model over the ranks as `kind` says, and let each write its file; the first writes the rest."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model(dtype, tied=tied)
    if rank == 0:
        model.config.save_pretrained(actor / "huggingface")
    if adapted:
        model = add_adapter(model)
        if rank == 0:
            model.save_pretrained(actor / "lora_adapter")
    dist.barrier()
    torch.save(_shard(model, kind, world), actor / f"model_world_size_{world}_rank_{rank}.pt")


def write_alone(actor: Path, kind: str, dtype: torch.dtype, tied: bool, adapted: bool = False) -> None:
    """Write what two ranks do, one after the other in this process: sharding at rest needs no communication."""
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            write(actor, kind, dtype, tied, adapted)
        finally:
            dist.destroy_process_group()


def _shard(model: nn.Module, kind: str, world: int) -> dict[str, Any]:
    names: tuple[str, ...] = ("fsdp",)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=names)
    if kind == "FSDP2 with replicas":
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ddp", "fsdp"))
    if kind.startswith("FSDP2"):
        fully_shard(model, mesh=mesh)
        return model.state_dict()
    given = {"device_mesh": mesh} if kind == "FSDP1 with a mesh" else {}
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, **given)
    return get_model_state_dict(wrapped, options=StateDictOptions(cpu_offload=True))
