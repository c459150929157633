"""The server's end of a weight sync: methods that vLLM's workers get to load weights and report their versions.

`vllm serve --worker-extension-cls r1_rollout.vllm.receiver.WeightReceiver` mixes them into every worker, and
`/collective_rpc` calls them there. Importing this module registers the transfer engine `r1_tcp` in vLLM.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from r1_rollout.transports.adapter import adapted_modules, check_bound, written_names
from r1_rollout.transports.groups import TcpReceiver
from r1_rollout.types import Expected, Json, JsonObject
from r1_rollout.vllm.sync import drop_unfinished, load_folder, prepare_loading, repack_heads
from r1_rollout.weight_checks import compare
from r1_rollout.weights import dtype_named

WeightTransferEngineFactory.register_engine("r1_tcp", "r1_rollout.vllm.receiver", "TcpTransferEngine")


class WeightReceiver:
    r1_base: str | None = None  # of the full weights that this worker holds; None while they change
    r1_version: str | None = None  # of what it answers with: the base, or the adapter upon it
    r1_unfinished = False  # a load of full weights has begun and has not ended

    def r1_load(self, folder: str, version: str) -> JsonObject:
        """Replace the model's weights by those in `folder`, named as in the Hugging Face checkpoint.

        Returns:
            The version and the number of tensors; or the failure, under `error`.
        """
        self.r1_open()
        tensors, error = load_folder(self, folder)
        self.r1_unfinished = False  # what an error has left was dropped
        if error:
            return {"error": error}
        self.r1_base = self.r1_version = version
        return {"version": version, "tensors": tensors}

    def r1_begin(self) -> JsonObject:
        worker: Any = self
        self.r1_open()
        worker.shutdown_weight_transfer_engine()  # leaves the group of a push that broke off
        config = worker.vllm_config.weight_transfer_config
        return {"backend": config.backend if config else None}

    def r1_commit(self, version: str) -> JsonObject:
        """Accept the weights since `r1_begin` as `version`. Raises RuntimeError without `r1_begin`."""
        if not self.r1_unfinished:
            raise RuntimeError("no broadcast of weights has begun in this worker")
        worker: Any = self
        worker.shutdown_weight_transfer_engine()
        repack_heads(worker.get_model())
        self.r1_unfinished = False
        self.r1_base = self.r1_version = version
        return {"version": version}

    def r1_adopt(self, folder: str, version: str) -> JsonObject:
        """Check the adapter in `folder`, which vLLM has loaded itself; return as `r1_load`."""
        names = written_names(folder)
        worker: Any = self
        try:
            check_bound(names, adapted_modules(worker.get_model()))
        except ValueError as error:
            return {"error": str(error)}
        self.r1_version = version
        return {"version": version, "tensors": len(names)}

    def r1_holds(self) -> JsonObject:
        return {"base": self.r1_base, "version": self.r1_version}

    def r1_compare(self, expected: dict[str, list[Json]]) -> JsonObject:
        """Return a `checksums.Comparison` in JSON, its sums as text. Shards of tensors are not compared.

        Args:
            expected: by the learner's names, the rows and the sums by precision, as text.
        """
        worker: Any = self
        if worker.parallel_config.tensor_parallel_size > 1:
            return {"differing": {}, "unread": list(expected)}
        sums = {
            name: Expected(rows, {kind: int(text) for kind, text in by_kind.items()})
            for name, (rows, by_kind) in expected.items()
        }
        found = compare(dict(worker.get_model().named_parameters()), sums)
        pairs = {name: [[str(total) for total in pair] for pair in one] for name, one in found.differing.items()}
        return {"differing": pairs, "unread": list(found.unread)}

    def r1_limits(self) -> dict[str, int]:
        worker: Any = self
        return {
            "vocabulary": worker.model_config.get_vocab_size(),
            "max_model_len": worker.model_config.max_model_len,
        }

    def r1_open(self) -> None:
        """Clear the version and the rest of an unfinished load, which would count for the next."""
        worker: Any = self
        self.r1_base = self.r1_version = None
        prepare_loading(worker)
        if self.r1_unfinished:
            with suppress(RuntimeError):  # there is no update, or it failed: vLLM has closed it
                worker.finish_weight_update()
            drop_unfinished(worker)
        self.r1_unfinished = True


@dataclass
class TcpInitInfo(WeightTransferInitInfo):
    address: str
    port: int
    secret: str
    seconds: float


class TcpTransferEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine with a `TcpGroup` instead, so that CPU tests run the GPU code."""

    init_info_cls = TcpInitInfo

    def init_transfer_engine(self, init_info: Any) -> None:
        self.model_update_group = TcpReceiver(init_info.address, init_info.port, init_info.secret, init_info.seconds)

    def update_weights(self, update_info: JsonObject) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base class would wait for an accelerator

    def receive_weights(self, update_info: Any) -> None:
        # A bucket is received whole, then loaded, so that a tensor which is refused leaves no sender waiting.
        group: Any = self.model_update_group
        bucket = []
        for name, kind, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=dtype_named(kind))
            group.receive(tensor)
            bucket.append((name, tensor))
        self.model.load_weights(bucket)
