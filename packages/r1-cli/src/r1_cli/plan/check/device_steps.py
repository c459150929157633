"""Steps of a tiny random model on a device: learner, optimizer, offloading, embedded engine; collectives of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from transformers import AutoModelForCausalLM, Qwen2Config

from r1_cli.models.attention import attend_packed
from r1_cli.models.load import enable_gradient_checkpointing
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.offload import Offload, OffloadableTensors
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, Shard, find_blocks, shard_model
from r1_core.objective import Objective
from r1_core.types import Sample

VOCABULARY, PROMPT, ANSWERS = 512, 40, (9, 30, 1, 17)
NUMBERS = 1 << 20  # numbers of a rank: enough for the path by which large messages go
HANG_SECONDS = 100.0  # for a collective: between some GPUs they hang where direct access is forbidden
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class _Prompt:
    id: str
    token_ids: list[int]
    position_ids: Tensor
    model_inputs: dict[str, Tensor] = field(default_factory=dict)


def make_model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen2Config(**CONFIG), dtype=torch.float32).to(dtype)


def check_training(device: torch.device, dtype: torch.dtype, share: bool, on_host: bool) -> tuple[Tensor, Tensor]:
    """Take a step of gradient descent at rate 1 on one sharded rank; return log-probs and changes of all weights.

    The CPU computes unsharded in float64, one padded sample at a time.
    """
    parallel = Parallel.single_process(device.type)
    try:
        model = make_model(torch.float32)
        before = [parameter.detach().double() for parameter in model.parameters()]
        attend_packed(model)
        enable_gradient_checkpointing(model, on_host=on_host)
        assert parallel.mesh is not None
        shard_model(model.to(device), find_blocks(model), parallel.mesh, Shard(dtype, torch.float32))
        found = _step(model, before, share=share, parallel=parallel, device=device, offload=Offload(True, True, True))
    finally:
        dist.destroy_process_group()
    exact = make_model(torch.float64)
    return found, _step(exact, before, share=False, packed=False)


def _step(model: Any, before: Sequence[Tensor], *, share: bool, packed: bool = True, **options: Any) -> Tensor:
    optimizer, limit = torch.optim.SGD(model.parameters(), lr=1.0), MicroLimit(samples=len(ANSWERS) if packed else 1)
    learner = Learner(
        model, optimizer, lambda step: 1.0, batching=Batching(packed, limit, limit, share_prompts=share), **options
    )
    samples = learner.add_logprobs(make_samples(), ["old_logprobs"])
    learner.offload()
    learner.forward_backward(samples, Objective())
    learner.optim_step()
    changes = [new.double().cpu() - old for (_, new), old in zip(learner.weights(), before, strict=True)]
    scale = max(float(change.abs().max()) for change in changes)  # so that log-probs and changes count alike
    logprobs = torch.cat([one.old_logprobs[one.loss_mask] for one in samples if one.old_logprobs is not None])
    return torch.cat([logprobs.double().cpu() * scale / 10, *(change.flatten() for change in changes)])


def make_samples() -> list[Sample]:
    """Return samples of one prompt and answers of different lengths."""
    draw, samples = torch.Generator().manual_seed(1), []
    prompt = torch.randint(0, VOCABULARY, (PROMPT,), generator=draw, dtype=torch.int32)
    for number, length in enumerate(ANSWERS):
        answer = torch.randint(0, VOCABULARY, (length,), generator=draw, dtype=torch.int32)
        trained = torch.arange(PROMPT + length) >= PROMPT
        samples.append(Sample(
            token_ids=torch.cat([prompt, answer]), loss_mask=trained, group_id=0, reward=0.0,
            position_ids=torch.arange(PROMPT + length)[None], advantages=trained * (1.5 if number % 2 else -0.5),
        ))  # fmt: skip
    return samples


def check_optimizer(device: torch.device, dtype: torch.dtype, strategy: str) -> tuple[Tensor, Tensor]:
    """Take three steps; the CPU computes AdamW by its definition in float64 (arXiv 1711.05101, Algorithm 2)."""
    draw = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(4, 1000, generator=draw).to(dtype)
    weight = torch.nn.Parameter(start.to(device))
    optimizer = build_optimizer([("weight", weight)], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, strategy=strategy)
    exact, mean, square = start.double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    for number, grad in enumerate(grads, start=1):
        weight.grad = grad.to(device)
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * grad.double(), 0.99 * square + 0.01 * grad.double() ** 2
        moved = mean / (1 - 0.9**number) / ((square / (1 - 0.99**number)).sqrt() + 1e-8)
        exact = exact - 0.1 * (0.1 * exact + moved)
    return weight.detach().cpu(), exact


def check_offload(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Offload tensors of many sizes to host memory and load them again."""
    draw = torch.Generator().manual_seed(0)
    kept = [torch.randn(size, generator=draw).to(dtype) for size in (1, 1000, 300_001, 5_000_000)]
    tensors = [tensor.clone().to(device) for tensor in kept]
    movable = OffloadableTensors(lambda: tensors)
    for _ in range(2):
        movable.offload()
        movable.load()
    return torch.cat([tensor.cpu() for tensor in tensors]), torch.cat(kept).double()


@torch.no_grad()
def check_engine(device: torch.device, dtype: torch.dtype, graphs: bool) -> tuple[Tensor, Tensor]:
    """Sample; return the log-probs of the tokens, and those of a forward pass without a cache on the CPU."""
    from r1_rollout.embedded import EmbeddedEngine
    from r1_rollout.types import SamplingParams
    from r1_rollout.weights import LocalWeights

    draw, source = torch.Generator().manual_seed(0), make_model(torch.float64)
    prompts = [
        _Prompt(
            str(length), torch.randint(0, VOCABULARY, (length,), generator=draw).tolist(), torch.arange(length)[None]
        )
        for length in (5, 60, 33)
    ]
    engine = EmbeddedEngine(make_model(dtype), end_token_ids=(), device=device, eager=not graphs)
    with engine.active(LocalWeights(source.to(dtype).state_dict().items(), 0)):
        groups = dict(engine.generate(prompts, SamplingParams(max_tokens=150, n=3)))
    found, exact = list[Tensor](), list[Tensor]()
    source = source.double()
    for number, prompt in enumerate(prompts):
        for one in groups[number]:
            ids = torch.tensor([[*prompt.token_ids, *one.token_ids.tolist()]])
            every = source(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            answer = ids[0, len(prompt.token_ids) :]
            exact.append(every[len(prompt.token_ids) - 1 : -1].gather(-1, answer[:, None])[:, 0])
            found.append(torch.tensor(one.logprobs))
    return torch.cat(found), torch.cat(exact)


def check_collectives(
    device: torch.device, dtype: torch.dtype, rank: int, ranks: int, meeting: str
) -> tuple[Tensor, Tensor]:
    """Sum, gather, scatter sums and broadcast as one of `ranks`; return what this rank has, and what the CPU finds."""
    draw = torch.Generator().manual_seed(0)
    parts = torch.randn(ranks, NUMBERS, generator=draw).to(dtype)  # of all ranks
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.accelerator.set_device_index(rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = FileStore(meeting, ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=HANG_SECONDS))
    try:
        own, last = parts[rank].to(device), parts[-1].to(device)
        summed = own.clone()
        dist.all_reduce(summed)
        gathered = own.new_empty(ranks * NUMBERS)
        dist.all_gather_into_tensor(gathered, own)
        scattered = own.new_empty(NUMBERS // ranks)
        dist.reduce_scatter_tensor(scattered, own[: NUMBERS // ranks * ranks].clone())
        sent = last if rank == ranks - 1 else torch.zeros_like(last)
        dist.broadcast(sent, ranks - 1)
        found = torch.cat([summed, gathered, scattered, sent]).double().cpu()
    finally:
        dist.destroy_process_group()
    total, whole = parts.double().sum(0), parts.double()
    share = total[: NUMBERS // ranks * ranks].view(ranks, -1)[rank]
    return found, torch.cat([total, whole.flatten(), share, whole[-1]])
