"""What tests of the vLLM engine share: tiny models, prompts, a started engine, plain forwards to compare with."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from r1_rollout.lora import Adapter
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.vllm.engine import VllmEngine
from r1_rollout.weights import LocalWeights

END, BANNED = 7, (60, 61)
TOLERANCE = 1e-5
SHAPE = {  # heads of 32: vLLM's attention on processors has no smaller ones
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "qwen2 tied": (Qwen2Config, Qwen2ForCausalLM, True),
    "qwen3 untied": (Qwen3Config, Qwen3ForCausalLM, False),
    "llama tied": (LlamaConfig, LlamaForCausalLM, True),
}
STARTED = {"dtype": "float32", "kv_cache_bytes": 1 << 26, "max_model_len": 128, "banned_token_ids": BANNED}


@dataclass(frozen=True)
class HandPrompt:
    id: str
    token_ids: list[int]
    position_ids: Tensor = field(default_factory=lambda: torch.zeros(1, 0))
    model_inputs: dict[str, Tensor] = field(default_factory=dict)


PROMPTS = [HandPrompt(f"p{length}", list(range(1, length + 1))) for length in (4, 1, 17, 9, 40)]


def make_model(family: str, seed: int = 0) -> Any:
    """Random weights, scaled up so that the model has opinions."""
    config, model, tied = FAMILIES[family]
    torch.manual_seed(seed)
    made = model(config(**SHAPE, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return made


@dataclass(frozen=True)
class Case:
    family: str
    model: Any
    engine: VllmEngine


def start(family: str, folder: Path, **options: Any) -> Iterator[Case]:
    model = make_model(family)
    model.save_pretrained(folder)
    engine = VllmEngine.load(str(folder), end_token_ids={END}, dummy_weights=True, **STARTED, **options)
    yield Case(family, model, engine)
    engine.close()


def sample(case: Case, params: SamplingParams, prompts: list[HandPrompt] = PROMPTS) -> list[list[Completion]]:
    """Sample from the case's own weights."""
    with case.engine.active(LocalWeights(case.model.state_dict().items(), next_version(case.engine))):
        groups = dict(case.engine.generate(prompts, params))
    return [groups[index] for index in range(len(prompts))]


def next_version(engine: VllmEngine) -> int:
    return engine._latest + 1


@torch.no_grad()
def plain_logprobs(model: Any, prompt: HandPrompt, token_ids: list[int], temperature: float) -> Tensor:
    logits = model(input_ids=torch.tensor([prompt.token_ids + token_ids]), use_cache=False).logits[0]
    logits = logits[len(prompt.token_ids) - 1 : -1] / (temperature or 1.0)
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def assert_exact(model: Any, groups: list[list[Completion]], temperature: float) -> None:
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            expected = plain_logprobs(model, prompt, completion.token_ids.tolist(), temperature)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=TOLERANCE, rtol=0)


def adapted(model: Any, seed: int) -> tuple[Any, Adapter]:
    """A copy of `model` with a low-rank change merged in, and the change alone."""
    generator = torch.Generator().manual_seed(seed)
    merged, weights = copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        if name.endswith(("q_proj", "v_proj", "down_proj")):
            a = torch.randn(4, module.in_features, generator=generator) / 10
            b = torch.randn(module.out_features, 4, generator=generator) / 10
            weights[f"base_model.model.{name}.lora_A.default.weight"] = a
            weights[f"base_model.model.{name}.lora_B.default.weight"] = b
            module.weight.data += 2.0 * b @ a
    return merged, Adapter(4, 8.0, ("q_proj", "v_proj", "down_proj"), weights.items())


def adapter_bytes(adapter: Adapter) -> int:
    """Of its factors."""
    return sum(tensor.nbytes for _, tensor in adapter.weights)


def bytes_in(folder: Path) -> int:
    """Of all tensors in the files of a folder, by the files' own headers."""
    total = 0
    for file in sorted(folder.rglob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(end - start for one in header.values() if "dtype" in one for start, end in [one["data_offsets"]])
    return total
