"""A second model with the weights of a first one: for an engine on the GPU of a learner that trains only an adapter."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from r1_cli.models.load import ModelError, configure_modules, without_dropout
from r1_rollout.loading import model_family
from r1_rollout.names import adapter_part, unwrapped


def share_weights(policy: nn.Module, config: PreTrainedConfig, *, trust_remote_code: bool = False) -> Any:
    """Return `load_model`'s model without adapters, whose weights are the policy's memory: never write to them.

    It has its own modules, hooks, buffers and configuration.

    Args:
        policy: a model with frozen, unsharded weights; its adapter's factors are left out.

    Raises:
        ModelError: the two have different weights.
    """
    config = without_dropout(config)
    with torch.device("meta"):
        model = model_family(config).from_config(config, trust_remote_code=trust_remote_code)
    params = {unwrapped(name): one for name, one in policy.named_parameters(remove_duplicate=False)}
    params = {name: one for name, one in params.items() if adapter_part(name) is None}
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if odd := sorted(names ^ params.keys()):
        raise ModelError(f"{type(model).__name__}: {len(odd)} weights are not those of the learner's model: {odd[0]}")
    shared = {id(one): nn.Parameter(_local(one), requires_grad=False) for one in params.values()}
    for name in names:
        _put(model, name, shared[id(params[name])])
    buffers = dict(policy.named_buffers())
    for name in [name for name, _ in model.named_buffers()]:
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        keeps = last not in module._non_persistent_buffers_set
        module.register_buffer(last, buffers[name].clone(), persistent=keeps)
    any_weight = next(iter(shared.values()))
    configure_modules(model, any_weight.dtype, any_weight.device)
    return model.eval()


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _put(model: nn.Module, name: str, param: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, param)
