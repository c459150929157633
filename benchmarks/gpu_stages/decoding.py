"""The embedded engine's tokens a second: its own stack with and without CUDA graphs, and the model's forward.

Beside whole calls, one step of the stack is timed as it is launched and as a graph of it is replayed. NOT RUN ON A GPU;
processors have nothing to capture and leave out what is of graphs.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gpu_stages.bench import Bench, Row, seconds, wait
from gpu_stages.models import model_config

SAMPLES = 8


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: list[int]
    position_ids: Tensor
    model_inputs: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Timed:
    """A stack that in the middle of a call repeats one step for the clock, which writes what is there already."""

    stack: Any
    bench: Bench
    middle: int
    taken: Row = field(default_factory=dict)
    steps: int = 0

    def is_watched(self) -> bool:
        return False

    def step(self, *arguments: Any) -> Tensor:
        self.steps += 1
        if self.steps == self.middle:
            self.taken["step ms"] = 1e3 * seconds(self.bench, lambda: self.stack.step(*arguments), 20)
            if self.bench.kind == "cuda":
                replay = captured(lambda: self.stack.step(*arguments))
                self.taken["step as a graph ms"] = 1e3 * seconds(self.bench, replay, 20)
        logits: Tensor = self.stack.step(*arguments)
        return logits


def captured(action: Callable[[], Tensor]) -> Callable[[], None]:
    """Return what replays the kernels of an action that has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def measure(bench: Bench) -> Iterator[Row]:
    shapes = [("tiny", 2, 6)] if bench.tiny else [("1.5B", 4, 256), ("1.5B", 64, 1024), ("7B", 4, 256), ("7B", 64, 512)]
    yield from (row for shape in shapes for row in _ways(bench, *shape))


def _ways(bench: Bench, name: str, prompts: int, tokens: int) -> list[Row]:
    from r1_rollout.embedded import EmbeddedEngine
    from r1_rollout.types import SamplingParams

    dtype = torch.float32 if bench.tiny else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(bench.kind):
        model = AutoModelForCausalLM.from_config(model_config(name), dtype=dtype)
    engine = EmbeddedEngine(model, end_token_ids=(), max_sequences=prompts * SAMPLES, device=bench.kind, version=0)
    draw, length = torch.Generator().manual_seed(0), 8 if bench.tiny else 256
    asked = [
        Prompt(str(index), torch.randint(0, 500, (length,), generator=draw).tolist(), torch.arange(length)[None])
        for index in range(prompts)
    ]
    stack, params = engine._stack, SamplingParams(max_tokens=tokens, n=SAMPLES)
    if stack is None:
        raise RuntimeError(f"the engine has no stack for {type(model).__name__}")
    timed, rows = Timed(stack, bench, max(tokens // 2, 1)), []
    list(engine.generate(asked, SamplingParams(max_tokens=4, n=SAMPLES)))  # warm-up
    ways = [("stack", stack, False), ("the model's forward", None, False)]
    ways += [("stack, graphs", stack, True)] if bench.kind == "cuda" else []
    for way, chosen, graphs in ways:
        engine._stack, engine._graphs = chosen, graphs
        wait(bench)
        start = time.perf_counter()
        said = sum(len(one.token_ids) for _, group in engine.generate(asked, params) for one in group)
        wait(bench)
        rows.append({"model": name, "rows": prompts * SAMPLES, "tokens": tokens, "way": way})
        rows[-1]["tokens/s"] = said / (time.perf_counter() - start)
    engine._stack, engine._graphs = timed, False  # type: ignore[assignment]
    list(engine.generate(asked, params))
    rows[0] |= timed.taken
    return rows
