"""What packing and shared prompts save a hybrid model: processor seconds of a step, beside padded micro-batches.

uv run python benchmarks/recurrent.py [--runs 3] [--groups 8]

A Qwen3.5 of random weights (six layers, 128 wide, every third with full attention) takes log-probs and a gradient of
groups of 8 answers, of log-normal lengths (median 60, sigma 0.8, at most 400) to prompts of 60 to 250 tokens. Layouts
are measured in turns on one thread, each with micro-batches of the same number of tokens, padding included. The best
of the runs counts. The last line is one JSON object.
"""

import argparse
import json
import math
import random
import time

import torch
import transformers as hf

from r1_cli.models.attention import attend_packed
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.objective import Objective
from r1_core.types import Sample

N, TOKENS, VOCAB = 8, 4096, 2048
LAYOUTS = {"padded": (False, False), "packed": (True, False), "shared": (True, True)}


def build() -> hf.PreTrainedModel:
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    config = hf.Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=6, layer_types=kinds,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    attend_packed(model)
    return model


def make_samples(groups: int) -> list[Sample]:
    draw, tokens = random.Random(0), torch.Generator().manual_seed(0)
    samples = []
    for group in range(groups):
        prompt = torch.randint(0, VOCAB, (draw.randint(60, 250),), generator=tokens)
        for _ in range(N):
            length = min(max(round(draw.lognormvariate(math.log(60), 0.8)), 1), 400)
            ids = torch.cat([prompt, torch.randint(0, VOCAB, (length,), generator=tokens)])
            mask = torch.arange(len(ids)) >= len(prompt)
            samples.append(
                Sample(
                    ids, mask, torch.arange(len(ids))[None], group_id=group, reward=0.0, prompt_length=len(prompt),
                    advantages=torch.where(mask, draw.uniform(-1, 1), 0.0),
                )
            )  # fmt: skip
    return samples


def measure(model: hf.PreTrainedModel, samples: list[Sample], layout: str) -> float:
    packed, share = LAYOUTS[layout]
    limit = MicroLimit(tokens=TOKENS)
    learner = Learner(
        model, build_optimizer(model.named_parameters(), lr=1e-3), lambda step: 1.0,
        batching=Batching(packed, limit, limit, share_prompts=share),
    )  # fmt: skip
    start = time.process_time()
    learner.forward_backward(learner.add_logprobs(samples, ["old_logprobs"]), Objective())
    seconds = time.process_time() - start
    model.zero_grad()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--groups", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, samples = build(), make_samples(arguments.groups)
    best = dict.fromkeys(LAYOUTS, math.inf)
    for run in range(arguments.runs + 1):
        for layout in LAYOUTS:
            seconds = measure(model, samples, layout)
            best[layout] = min(best[layout], seconds) if run else math.inf  # the first warms up
    for layout, seconds in best.items():
        print(f"{layout:8} {seconds:6.2f} s, {best['padded'] / seconds:.2f} times as fast as padded")
    print(json.dumps({"seconds": best, "tokens": sum(len(sample.token_ids) for sample in samples)}))


if __name__ == "__main__":
    main()
