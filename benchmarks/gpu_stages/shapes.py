"""A 7B shape end to end by the command that users type: engines on the learner's devices, and apart."""

import tempfile
from pathlib import Path

from gpu_stages.bench import Bench, Row
from gpu_stages.training import train_shape, write_model


def measure(bench: Bench) -> list[Row]:
    name, ranks = ("tiny", 1) if bench.tiny else ("7B", max(bench.devices // 2, 1))
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        write_model(bench, name, folder)
        engine = "embedded" if bench.tiny else "vllm"
        common = [f"worker.rollout.name={engine}", "worker.rollout.tensor_parallel_size=1"]
        forms = {"colocated": [f"trainer.n_gpus_per_node={ranks if bench.tiny else bench.devices}"]}
        if not bench.tiny and bench.devices > 1:
            engines = [f"worker.rollout.engines.n_gpus_per_node={ranks}", "worker.rollout.engines.nnodes=1"]
            forms["apart"] = [f"trainer.n_gpus_per_node={bench.devices - ranks}", *engines]
        for form, settings in forms.items():
            row: Row = {"model": name, "devices": 1 if bench.tiny else bench.devices, "engines": form}
            rows.append(row | train_shape(bench, folder, *common, *settings, steps=3 if bench.tiny else 5))
    return rows
