"""The server's end of a weight push: what r1 adds to vLLM's workers to take weights up and say which they hold.

`vllm serve --worker-extension-cls r1_rollout.vllm.receiver.WeightReceiver` mixes it into every worker, and
`/collective_rpc` calls it there.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from r1_rollout.vllm.adapter import adapted_modules, check_bound, written_names
from r1_rollout.vllm.shards import read_shards
from r1_rollout.vllm.sync import repack_heads


class WeightReceiver:
    """Methods of a vLLM worker; `self` is the worker."""

    r1_base: str | None = None  # of the full weights that this worker holds; None while they change
    r1_version: str | None = None  # of what it answers with: the base, or the adapter upon it

    def r1_load(self, folder: str, version: str) -> dict[str, Any]:
        """Replace the model's weights by those in `folder`, named as in the Hugging Face checkpoint.

        Returns:
            The version, and how many tensors there were, for the sender to compare; or what went wrong, under `error`.
        """
        self.r1_base = self.r1_version = None
        tensors = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal tensors
            for named in read_shards(folder):
                tensors += 1
                yield named

        worker: Any = self
        try:
            worker.reload_weights(weights_iterator=counted())
            repack_heads(worker.get_model())
        except Exception as error:  # whatever it is, the sender must hear of it
            return {"error": f"{type(error).__name__}: {error}"}
        self.r1_base = self.r1_version = version
        return {"version": version, "tensors": tensors}

    def r1_adopt(self, folder: str, version: str) -> dict[str, Any]:
        """Go by the adapter in `folder`, which vLLM has taken up by itself, upon the base that is there.

        Returns:
            As `r1_load`; an `error` names what vLLM cannot bind, which it passes over in silence.
        """
        names = written_names(folder)
        worker: Any = self
        try:
            check_bound(names, adapted_modules(worker.get_model()))
        except ValueError as error:
            return {"error": str(error)}
        self.r1_version = version
        return {"version": version, "tensors": len(names)}

    def r1_holds(self) -> dict[str, Any]:
        """Return the versions of this worker's weights."""
        return {"base": self.r1_base, "version": self.r1_version}
