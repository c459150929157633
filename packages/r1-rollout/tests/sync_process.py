"""A process of its own that syncs an engine and prints, as JSON, what that did to its memory in bytes.

Argument: `peak` (syncs of a model of 120 MB, in buckets), `cycles` (ten thousand syncs and sleeps of a tiny model) or
`sleep` (a large cache of keys and values).
"""

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rollout_models import TEXT
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights, buckets

MEGABYTE = 2**20
PROMPT = SimpleNamespace(id="p", token_ids=[5, 9, 7], position_ids=torch.arange(3)[None], model_inputs={})


def memory(field: str) -> int:
    """What the kernel says of this process now: VmRSS, resident; VmHWM, the most that ever was."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def make(**sizes: Any) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**{**TEXT, **sizes}))


def fresh(shapes: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that exist only once they are asked for, as gathered shards do."""
    for name, shape in shapes.items():
        yield name, torch.full(shape, 0.01)


def peak() -> dict[str, int]:
    model = make(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    size = sum(tensor.nbytes for tensor in model.parameters())
    engine, bound = EmbeddedEngine(model.bfloat16(), end_token_ids={0}), 8 * MEGABYTE
    before, most = memory("VmRSS"), 0
    for version in range(3):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the most that was
        given = chain.from_iterable(buckets(fresh(shapes), bound, torch.bfloat16))
        with engine.active(LocalWeights(given, version)):
            most = max(most, memory("VmHWM") - before)
    return {"model": size, "bucket": bound, "above": most}


def cycles() -> dict[str, int]:
    engine, source = EmbeddedEngine(make(num_hidden_layers=1), end_token_ids={0}), make(num_hidden_layers=1)
    after_warm_up = 0
    for version in range(10_000):
        with engine.active(LocalWeights(source.named_parameters(), version)):
            if version % 100 == 0:
                list(engine.generate([PROMPT], SamplingParams(max_tokens=2, n=2)))
                engine.logprobs_of([PROMPT], [[3, 4]])
        if version == 1_000:
            after_warm_up = memory("VmRSS")
    return {"grown": memory("VmRSS") - after_warm_up, "cycles": version + 1}


def sleep() -> dict[str, int]:
    model = make(hidden_size=512, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=4)
    engine = EmbeddedEngine(model, end_token_ids={0})
    with engine.active(LocalWeights(model.state_dict().items(), 0)):  # what the first call of all allocates stays
        list(engine.generate([PROMPT], SamplingParams(max_tokens=2, n=2)))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with engine.active(LocalWeights(model.state_dict().items(), 1)):
        next(engine.generate([PROMPT], SamplingParams(max_tokens=150, n=48, ignore_eos=True)))
    return {"active": memory("VmHWM") - before, "left": memory("VmRSS") - before}


if __name__ == "__main__":
    print(json.dumps({"peak": peak, "cycles": cycles, "sleep": sleep}[sys.argv[1]]()))
