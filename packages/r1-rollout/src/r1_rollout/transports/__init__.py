"""How weights reach an engine: read in its process, or sent by one of these transports.

| transport | file | carries |
|---|---|---|
| in process | `r1_rollout.weights` | named tensors that the engine reads one by one |
| folder | `folder.py` | safetensors files that ranks write and servers or workers read |
| direct | `direct.py` | buckets from GPU to GPU, over NCCL or CUDA IPC; over TCP between CPUs |
| adapter | `adapter.py` | LoRA factors alone, as files in PEFT's format |
| objects | `r1_cli.cluster.engines` | buckets in Ray's object store, or a subprocess's pipe |
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from r1_rollout.weights import WeightSource

M = TypeVar("M", contravariant=True)


class Transport(Protocol[M]):
    """Moves one version of a learner's weights into members of a pool."""

    def send(self, source: WeightSource, members: Sequence[M]) -> Sequence[Exception | None]:
        """Return what each member has failed at; None: it has the weights. Raises if the source fails."""
