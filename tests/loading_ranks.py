"""Functions that gloo ranks run in the tests of sharded loading."""

import gc
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from r1_cli.models.load import ModelError, load_config, load_model
from r1_core.learner.parallel import Parallel, Shard, full_tensor, reshard

CPU = torch.device("cpu")


def load(path, parallel=None, dtype=torch.float32, shard=None, **overrides):
    config = load_config(path, overrides=overrides)
    return load_model(path, config=config, dtype=dtype, device=CPU, parallel=parallel, shard=shard or Shard())


def state(model):
    """Parameters and buffers of all kinds by name, whole; tied ones under each of their names."""
    found = {name: full_tensor(tensor).clone() for name, tensor in model.named_parameters(remove_duplicate=False)}
    return found | {name: tensor.clone() for name, tensor in model.named_buffers(remove_duplicate=False)}


def compare(path, dtype=torch.float32, shard_size=-1, offload=False):
    """Return the tensors in which a model loaded in parts differs from one loaded whole, and what it computes."""
    parallel = Parallel.join("cpu", shard_size=shard_size)
    parts, full = load(path, parallel, dtype, Shard(offload=offload)), load(path, dtype=dtype)
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        logits = [model(input_ids=tokens).logits for model in (parts, full)]
    reshard(parts)
    here, there = state(parts), state(full)
    differing = [name for name, tensor in there.items() if name not in here or not torch.equal(here[name], tensor)]
    differing += [name for name in there if here[name].dtype != there[name].dtype]
    share = sum(p.to_local().numel() for p in parts.parameters()) / sum(p.numel() for p in full.parameters())
    tied = parts.get_input_embeddings().weight is parts.get_output_embeddings().weight
    return differing + sorted(set(here) - set(there)), share, torch.equal(*logits), tied


def step(path):
    """Return how far weights after a step are from one process's, with the vision tower frozen after loading."""
    parallel = Parallel.join("cpu")
    ends = []
    for among in (parallel, None):
        model = load(path, among)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("visual" not in name)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        # FSDP adds gradients up: each rank gives its share of the loss.
        loss = model(input_ids=torch.arange(1, 12)[None]).logits.logsumexp(-1).sum() / 100
        (loss / (1 if among is None else among.world)).backward()
        optimizer.step()
        ends.append(state(model))
    return max((ends[0][name] - tensor).abs().max().item() for name, tensor in ends[1].items())


def refuse(path, overrides=None):
    """Return what is said of a model that cannot be loaded, None where nothing is."""
    try:
        load(path, Parallel.join("cpu"), **(overrides or {}))
    except ModelError as error:
        return str(error)
    return None


def measure(path, small):
    """Return by how many bytes this process grows when it loads its part; `small` is loaded first, for the imports."""
    parallel = Parallel.join("cpu")
    load(str(small), parallel)
    gc.collect()
    before = psutil.Process().memory_info().rss
    model = load(path, parallel)
    gc.collect()
    dist.barrier()
    grown = psutil.Process().memory_info().rss - before
    return grown, sum(p.numel() * 4 for p in model.parameters())


def folder_of(family: str, folder: Path, **config):
    """Write a tiny model of the family, with other settings in its text configuration; return its path."""
    import families

    made = hybrid() if family == "olmo_hybrid" else families.make_config(family)
    for name, value in config.items():
        setattr(made.get_text_config() if name != "tie_word_embeddings" else made, name, value)
    torch.manual_seed(0)
    kind = (
        families.hf.AutoModelForImageTextToText if hasattr(made, "vision_config") else families.hf.AutoModelForCausalLM
    )
    kind.from_config(made).save_pretrained(folder)
    return str(folder)


def hybrid():
    """The configuration of a family that joins rows of three matrices on loading."""
    import transformers

    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.AutoConfig.for_model(
        "olmo_hybrid", vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, layer_types=["linear_attention", "full_attention"], **ends,
    )  # fmt: skip
