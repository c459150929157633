"""Engines that take weights by a sender's calls, as vLLM's workers do, but over TCP into an embedded model."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from cli_engines import END, OneHost, as_set
from cli_ranks import Stored, build
from core_models import qwen2

from r1_cli.cluster.direct import DirectBackend
from r1_cli.cluster.engine import EngineHost
from r1_cli.cluster.rank import Rank
from r1_cli.cluster.weights import RankedWeights
from r1_core.learner.parallel import Parallel
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.errors import WeightsError
from r1_rollout.transports import direct
from r1_rollout.transports.groups import TcpReceiver
from r1_rollout.weights import DirectWeights, LocalWeights

BACKEND = DirectBackend("r1_tcp", 1)


class Taking(EmbeddedEngine):
    """Does with the calls what a worker of vLLM's does with them; `order` tells what came."""

    def __init__(self, order: list[str], **options: Any) -> None:
        super().__init__(qwen2(5), end_token_ids={END}, **options)
        self.order, self.refuses = order, ""
        self._group: TcpReceiver | None = None

    def _load(self, source: Any) -> None:
        if not isinstance(source, DirectWeights):
            return super()._load(source)
        brought: list[tuple[str, torch.Tensor]] = []
        for call in source.calls():
            self.order.append(call.verb)
            if call.verb == "init_weight_transfer_engine":
                self._group = TcpReceiver(**call.request["init_info"])
            elif call.verb == "update_weights":
                assert self._group is not None
                info = call.request["update_info"]
                for name, kind, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                    tensor = torch.empty(shape, dtype=getattr(torch, kind))
                    self._group.receive(tensor)
                    brought.append((name, tensor))
                if self.refuses in info["names"]:
                    raise WeightsError(f"no room for {self.refuses}")
        self.order.append("active")
        return super()._load(LocalWeights(brought, source.version))


def delivered(dtype: torch.dtype | None, refuses: str = "") -> list[str]:
    """A case of `ranks`: two ranks send their shards to two engines beside rank 0, twice; return what was wrong.

    Rank 1 is asked by itself what a driver would ask it. With `refuses` the first engine will not have that tensor the
    first time.
    """
    direct.BUCKET = 4_000
    parallel = Parallel.join("cpu")
    rank = Rank(partial(build, "text", "KL"), parallel.rank, parallel.world)
    rank.learner, rank.objective = build("text", "KL", parallel)
    if parallel.rank > 0:
        for _ in range(2):
            rank.send_weights(BACKEND, [], dtype)
        for _ in rank.learner.weights():
            pass
        return []
    order: list[str] = []
    engines = [Taking(order) for _ in range(2)]
    members = [OneHost(EngineHost(lambda stack, engine=engine: hold(stack, engine))) for engine in engines]
    rank.learner.offload = lambda: order.append("rest")  # type: ignore[method-assign]
    together = as_set(members, dtype=dtype, backend=BACKEND)
    engines[0].refuses = refuses
    wrong = []
    for version in (3, 4):
        source = RankedWeights(lambda verb, *args: getattr(rank, verb)(*args), Stored.put, version)
        try:
            with together.active(source):
                order.append("sampling")
        except WeightsError as error:
            wrong.append(str(error))
        engines[0].refuses = ""
    whole = {name: tensor.clone().to(dtype or tensor.dtype) for name, tensor in rank.learner.weights()}
    for engine in engines:
        own = engine._model.state_dict()
        wrong += [name for name, tensor in whole.items() if not torch.equal(own[name], tensor.to(own[name].dtype))]
    for member in members:
        member.close()
    return [*wrong, *order]


def hold(stack: ExitStack, engine: Any) -> Any:
    return engine
