"""New weights on their way to the engines: seconds and the canary's gap, by every way and size of an engine."""

import tempfile
from pathlib import Path

from gpu_stages.bench import Bench, Row, Skipped
from gpu_stages.training import train_shape, write_model


def measure(bench: Bench) -> list[Row]:
    bench.require(2)
    name = "tiny" if bench.tiny else "1.5B"
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        write_model(bench, name, folder)
        for way, ranks, size, settings in _cases(bench):
            row: Row = {"model": name, "way": way, "ranks": ranks, "GPUs of an engine": size}
            try:
                row |= train_shape(bench, folder, *settings)
            except Skipped as reason:
                row["failed"] = str(reason)
            rows.append(row)
    if any("failed" in row for row in rows):
        print(*rows, sep="\n")
        raise SystemExit(f"{sum('failed' in row for row in rows)} of {len(rows)} ways failed: see the log")
    return rows


def _cases(bench: Bench) -> list[tuple[str, int, int, list[str]]]:
    """Every way with as many devices as it takes; processors have one way, and a second process for it."""
    if bench.tiny:
        return [("objects", 2, 1, _settings(2, 1, "embedded"))]
    cases = [("one process", 1, 1, _settings(1, 1, "vllm"))]
    for size in (1, 2, 4):
        ranks = max(2, size)
        if ranks <= bench.devices:
            cases.append(("IPC", ranks, size, _settings(ranks, size, "vllm")))
        if ranks + size <= bench.devices:
            cases.append(("NCCL", ranks, size, [*_settings(ranks, size, "vllm"), *_apart(size)]))
    return [*cases, ("objects", 2, 1, _settings(2, 1, "embedded"))]


def _settings(ranks: int, size: int, engine: str) -> list[str]:
    return [
        f"trainer.n_gpus_per_node={ranks}", f"worker.rollout.tensor_parallel_size={size}",
        f"worker.rollout.name={engine}",
    ]  # fmt: skip


def _apart(gpus: int) -> list[str]:
    return ["worker.rollout.engines.nnodes=1", f"worker.rollout.engines.n_gpus_per_node={gpus}"]
