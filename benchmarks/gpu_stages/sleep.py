"""What a sleeping vLLM leaves of a device, and how long it takes to sleep and to wake."""

import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gpu_stages.bench import Bench, Row, Skipped, wait
from gpu_stages.models import empty_model, model_config, random_tensor


def measure(bench: Bench) -> Iterator[Row]:
    if not find_spec("vllm"):
        raise Skipped("vLLM is not installed")
    yield from (_sleep(bench, name) for name in (["tiny"] if bench.tiny else ["1.5B", "7B"]))


def _sleep(bench: Bench, name: str) -> Row:
    from r1_rollout.vllm.engine import VllmEngine
    from r1_rollout.weights import LocalWeights

    device, dtype = torch.device(bench.kind), torch.float32 if bench.tiny else torch.bfloat16
    row: Row = {"model": name, "free GB before": _free(bench)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        config = model_config(name)
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder)
        options: dict[str, Any] = {"kv_cache_bytes": 1 << 24} if bench.tiny else {}
        engine = VllmEngine.load(
            str(folder), end_token_ids={0}, dummy_weights=True, max_model_len=64 if bench.tiny else 4096,
            dtype=str(dtype).removeprefix("torch."), **options,
        )  # fmt: skip
    row["free GB asleep, at first"] = _free(bench)
    names = [(key, parameter.shape) for key, parameter in empty_model(name).named_parameters()]

    def weights() -> Any:
        return ((key, random_tensor(key, shape, device).to(dtype)) for key, shape in names)

    for version in range(2):  # the second is measured
        start = time.perf_counter()
        with engine.active(LocalWeights(weights, version)):
            wait(bench)
            row["wake and load s"] = time.perf_counter() - start
            row["free GB awake"] = _free(bench)
            start = time.perf_counter()
        wait(bench)
        row["sleep s"] = time.perf_counter() - start
    row["free GB asleep"] = _free(bench)
    engine.close()
    return row


def _free(bench: Bench) -> float | None:
    return torch.cuda.mem_get_info()[0] / 1e9 if bench.kind == "cuda" else None
