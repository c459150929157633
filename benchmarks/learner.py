"""The update with and without shared prompts: tokens a second, how far from the machine's limit, and memory.

uv run python benchmarks/learner.py [--shapes tiny | small | vision]       # here; `small` is 30 M parameters
uv run python benchmarks/learner.py --gpu                                  # one GPU: 7B, 7B-VL and a Qwen3 MoE

A gradient of 8 answers to each prompt and an optimizer step, through `r1_core.Learner`, at prompt:answer of 1024:256,
512:512 and 128:1024 tokens; weights are random, in float32 on processors and in bfloat16 (with `adamw_bf16` and
gradient checkpointing) on a GPU. The two ways take turns, each for every micro-batch of `--budget` tokens; the best
turn of each counts, and the ratio is of those. Tokens a second are of prompts and answers as the loss sees them, a
prompt once an answer, in both ways.

MFU is the arithmetic of what must be computed, each prompt once in both ways, to what the machine does: 6 FLOPs for a
weight and a token that it multiplies (the head's tokens are the answers', a picture's patches the tower's, an expert's
those that are routed to it), and attention's 12 for a pair of tokens, head and size of a head; what checkpointing
computes again is not counted. The machine's rate is its maker's figure for a known GPU, and else that of torch's best
matrix product here. Memory, by budget, is what the update takes at most above what was there before: allocated on a
GPU, resident on processors, where it is rougher. The MoE is Qwen3-30B-A3B's shape with 12 of its 48 layers, so that
weights and states fit one card. Shapes that want a GPU where there is none are named as missing. The last line is one
JSON object.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from gpu_stages.bench import Bench, wait
from gpu_stages.models import model_config
from learner_work import Work, useful_flops
from rollout_prompts import make_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3MoeConfig

from r1_cli.hardware import peak_flops
from r1_cli.models.attention import PACKED_ATTENTION, attend_packed
from r1_cli.models.load import enable_gradient_checkpointing
from r1_core import Batching, Learner, MicroLimit, Objective, Sample, build_optimizer
from r1_data.positions import position_ids_of

ANSWERS = 8
LENGTHS = [(1024, 256), (512, 512), (128, 1024)]
HERE, ON_GPU = ["tiny", "small", "vision"], ["7B", "7B-VL", "moe"]
BUDGETS = {"cpu": [4096, 12288], "cuda": [16384, 32768, 65536]}
GROUPS = {"tiny": 2, "vision": 2, "small": 1}
SIDE = {"vision": 32, "7B-VL": 40}  # patches of a picture's side
SHARES = "share_prompts" in {field.name for field in fields(Batching)}
MOE = Qwen3MoeConfig(
    hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=12, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
    max_position_embeddings=32768, tie_word_embeddings=False, norm_topk_prob=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to compute an update."""

    share: bool
    budget: int


def build(name: str, bench: Bench) -> nn.Module:
    """Return a model of random weights."""
    if name in HERE:
        model = make_model(name)
    else:
        config: Any = MOE if name == "moe" else model_config(name)
        family = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device(bench.kind):
            model = family.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
    attend_packed(model)
    if bench.kind == "cuda":
        enable_gradient_checkpointing(model)
    return model.train()  # type: ignore[no-any-return]


def make_groups(model: Any, name: str, groups: int, prompt: int, answer: int) -> list[Sample]:
    """Return 8 samples of each group, whose prompt begins with a picture where the model sees."""
    draw, samples = torch.Generator().manual_seed(0), list[Sample]()
    top, length = model.config.get_text_config().vocab_size - 8, prompt + answer
    known = {"prompt_length": prompt} if SHARES else {}
    for group in range(groups):
        prompt_ids = torch.randint(2, top, (prompt,), generator=draw, dtype=torch.int32)
        positions, inputs = torch.arange(length)[None], dict[str, Tensor]()
        if name in SIDE:
            prompt_ids, positions, inputs = put_picture(model.config, prompt_ids, length, SIDE[name], draw)
        for index in range(ANSWERS):
            said = torch.randint(2, top, (answer,), generator=draw, dtype=torch.int32)
            trained = torch.arange(length) >= prompt
            samples.append(
                Sample(
                    torch.cat([prompt_ids, said]), trained, positions, group, 0.0, inputs, **known,  # type: ignore[arg-type]
                    old_logprobs=trained * -6.0, advantages=trained * (1.75 if index == 0 else -0.25),
                )
            )  # fmt: skip
    return samples


def put_picture(
    config: Any, prompt: Tensor, length: int, side: int, draw: torch.Generator
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Put a picture of `side` x `side` patches, or what fits of it, at a prompt's begin; positions and inputs, too."""
    merged = config.vision_config.spatial_merge_size
    while (side // merged) ** 2 > len(prompt) - 2:
        side -= merged
    places = (side // merged) ** 2
    prompt[0], prompt[1 : places + 1] = config.vision_start_token_id, config.image_token_id
    kinds, grid = torch.zeros(length, dtype=torch.int64), torch.tensor([[1, side, side]])
    kinds[1 : places + 1] = 1
    rule = position_ids_of(config)
    assert rule is not None
    ids = torch.cat([prompt, torch.full((length - len(prompt),), 2, dtype=torch.int32)])
    tower = config.vision_config
    pixels = torch.randn(
        side * side, tower.in_channels * tower.temporal_patch_size * tower.patch_size**2, generator=draw
    )
    positions = rule(ids, {"mm_token_type_ids": kinds, "image_grid_thw": grid})
    return prompt, positions, {"pixel_values": pixels, "image_grid_thw": grid}


def update(learner: Learner, samples: list[Sample], setting: Setting, bench: Bench) -> tuple[float, float]:
    """Take an update; return its seconds, and the gigabytes that it took at most."""
    limit = MicroLimit(tokens=setting.budget)
    shared = {"share_prompts": setting.share} if SHARES else {}
    learner.batching = replace(Batching(True, limit, limit), **shared)
    gc.collect()
    before = _forget_peak(bench)
    wait(bench)
    start = time.perf_counter()
    learner.forward_backward(samples, Objective())
    learner.optim_step()
    wait(bench)
    return time.perf_counter() - start, (_peak(bench) - before) / 1e9


def _forget_peak(bench: Bench) -> int:
    """Begin to watch memory anew; return the bytes in use."""
    if bench.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier updates have let go of
    Path("/proc/self/clear_refs").write_text("5")  # the peak of what is resident becomes what is resident now
    return psutil.Process().memory_info().rss


def _peak(bench: Bench) -> int:
    if bench.kind == "cuda":
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def machine_rate(bench: Bench, hidden: int, inner: int) -> float:
    """FLOP/s: of its data sheet, or of torch's best product of a layer's shape."""
    if known := peak_flops(bench.device_name):
        return known
    left, right = torch.randn(4096, hidden), torch.randn(hidden, inner)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - start)
    return 2 * 4096 * hidden * inner / min(times)


def measure(name: str, bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Take the turns of a shape; return a row for each pair of lengths."""
    torch.manual_seed(0)
    model = build(name, bench)
    text = model.config.get_text_config()
    strategy = "adamw_bf16" if bench.kind == "cuda" else "adamw"
    optimizer = build_optimizer(model.named_parameters(), lr=1e-6, strategy=strategy)
    learner = Learner(model, optimizer, lambda step: 1.0, device=torch.device(bench.kind))
    rate = machine_rate(bench, text.hidden_size, text.intermediate_size)
    ways = [Setting(share, budget) for budget in options.budget or BUDGETS[bench.kind] for share in (False, True)]
    ways = [way for way in ways if SHARES or not way.share]
    rows = []
    for prompt, answer in LENGTHS:
        groups = options.groups or GROUPS.get(name, 8)
        samples = make_groups(model, name, groups, prompt, answer)
        flops = useful_flops(model, Work.of(model, samples, groups, ANSWERS, prompt, answer))
        found: dict[Setting, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(options.rounds + 1):
            for way in ways:
                taken = update(learner, samples, way, bench)
                if turn or options.rounds == 0:
                    found[way].append(taken)
        rows.append(row_of(name, prompt, answer, found, len(samples) * (prompt + answer), flops / rate))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def row_of(
    name: str, prompt: int, answer: int, found: dict[Setting, list[tuple[float, float]]], tokens: int, limit: float
) -> dict[str, Any]:
    """Return what the table says of one pair of lengths; `limit` is the seconds that arithmetic alone would take."""
    row: dict[str, Any] = {"shape": name, "lengths": f"{prompt}:{answer}", "limit_s": round(limit, 4)}
    for share, label in ((False, "repeated"), (True, "shared")):
        ways = [way for way in found if way.share is share]
        if not ways:
            row[label] = "missing: this version shares no prompts"
            continue
        best = min(ways, key=lambda way: min(found[way])[0])
        seconds, _ = min(found[best])
        memory = {way.budget: round(max(one for _, one in found[way]), 3) for way in ways}
        row[label] = {
            "seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds),
            "mfu": round(limit / seconds, 4), "budget": best.budget, "peak_gb": memory,
        }  # fmt: skip
    if isinstance(row["shared"], dict):
        row["times_as_fast"] = round(row["repeated"]["seconds"] / row["shared"]["seconds"], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=[*HERE, *ON_GPU])
    parser.add_argument("--gpu", action="store_true", help="the shapes that want a GPU")
    parser.add_argument("--budget", nargs="+", type=int, help="tokens of a micro-batch, tried in both ways")
    parser.add_argument("--groups", type=int, help="of 8 answers each, in an update")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    bench = Bench.on_this_machine(not (options.gpu and torch.cuda.is_available()))
    names = options.shapes or (ON_GPU if options.gpu else ["tiny"])
    missing = [name for name in names if name in ON_GPU and bench.kind == "cpu"]
    for name in missing:
        print(f"{name}: missing, for torch sees no GPU here")
    load, rows = os.getloadavg()[0], list[dict[str, Any]]()
    for name in names:
        if name not in missing:
            rows += measure(name, bench, options)
    ratios = {
        f"{row['shape']}_{row['lengths'].replace(':', '_')}_ratio": row["times_as_fast"]
        for row in rows
        if "times_as_fast" in row
    }
    said = {"device": bench.device_name, "threads": torch.get_num_threads(), "load_before": round(load, 1)}
    print(json.dumps({"benchmark": "learner", **said, "missing": missing, "rows": rows, **ratios}))


if __name__ == "__main__":
    main()
