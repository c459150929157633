"""How weights reach an engine: read in its process (`weight_source`), or sent by one of these transports.

| transport | file | carries |
|---|---|---|
| in process | `r1_rollout.weight_source` | named tensors that the engine reads one by one |
| folder | `folder.py` | safetensors files that ranks write and every server or worker reads |
| direct | `direct.py` | buckets from GPU to GPU, over NCCL or CUDA IPC; over TCP between CPUs |
| adapter | `adapter.py` | LoRA factors alone, as files in PEFT's format |

A further one needs the cluster of r1-cli: buckets in its object store (`r1_cli.cluster.weights`).
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from r1_rollout.weight_source import WeightSource

M = TypeVar("M", contravariant=True)


class Transport(Protocol[M]):
    """Moves one version of a learner's weights into members of a pool."""

    def send(self, source: WeightSource, members: Sequence[M]) -> Sequence[Exception | None]:
        """Return what each member has failed at; None: it has the weights. Raises if the source fails."""
