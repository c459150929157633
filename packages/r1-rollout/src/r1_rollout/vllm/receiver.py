"""The server's end of a weight push: what r1 adds to vLLM's workers to load a folder of shards and say its version.

`vllm serve --worker-extension-cls r1_rollout.vllm.receiver.WeightReceiver` mixes it into every worker, and
`/collective_rpc` calls it there.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from r1_rollout.vllm.shards import read_shards
from r1_rollout.vllm.sync import repack_heads


class WeightReceiver:
    """Methods of a vLLM worker; `self` is the worker."""

    r1_version: str | None = None  # of the weights that this worker holds; None while they change

    def r1_load(self, folder: str, version: str) -> dict[str, Any]:
        """Replace the model's weights by those in `folder`, named as in the Hugging Face checkpoint.

        Returns:
            The version, and how many tensors there were, for the sender to compare.
        """
        self.r1_version = None
        tensors = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal tensors
            for named in read_shards(folder):
                tensors += 1
                yield named

        worker: Any = self
        worker.reload_weights(weights_iterator=counted())
        repack_heads(worker.get_model())
        self.r1_version = version
        return {"version": version, "tensors": tensors}

    def r1_holds(self) -> dict[str, Any]:
        """Return the version of this worker's weights."""
        return {"version": self.r1_version}
