"""N ranks that train nothing: the driver's client and its messages are real, models and devices are not."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r1_cli.cluster.rank import NewFields, Rank, TokenBalance
from r1_core.learner.trainable import LearnerInfo
from scale_parts.counted import Kept, Traffic

LOGPROB = -0.5  # of every token, to ranks and engines alike
BUCKETS = 57  # of 256 MiB, as the 15.2 GB of Qwen2.5-7B in bfloat16 have
LAYERS = 28


def tensors_of_7b() -> dict[str, tuple[int, ...]]:
    """Return names and shapes of Qwen2.5-7B's 339 tensors."""
    width, inner, kv, words = 3584, 18944, 512, 152064
    layer = {
        "self_attn.q_proj.weight": (width, width), "self_attn.q_proj.bias": (width,),
        "self_attn.k_proj.weight": (kv, width), "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, width), "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (width, width), "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width), "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
    }  # fmt: skip
    layers = {f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    both = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (words, width))
    return both | {"model.norm.weight": (width,)} | layers


class StandInLearner:
    """The learner of one rank, which knows how it would describe itself."""

    def describe(self) -> LearnerInfo:
        return LearnerInfo(1, 6.0, "cpu", None, None)


@dataclass
class StandInRanks:
    """A `WorkerGroup` of N ranks that answer at once."""

    count: int
    traffic: Traffic = field(default_factory=Traffic)
    tokens: int = 0  # of a response
    left: int = 0  # buckets of the pass over the weights

    def __post_init__(self) -> None:
        self.ranks = [Rank(lambda parallel: None, rank, self.count) for rank in range(self.count)]  # type: ignore
        for rank in self.ranks:
            rank.learner, rank._loads = StandInLearner(), TokenBalance(self.count)  # type: ignore[assignment]

    def call(self, verb: str, *args: Any, label: str = "") -> Any:
        answer = self.answer(verb, args, label)
        self.traffic.add(label or verb, args, [answer] + [None] * (self.count - 1))
        return answer

    def call_all(self, verb: str, *args: Any, label: str = "") -> list[Any]:
        answers = [getattr(rank, verb)(*args) for rank in self.ranks]
        self.traffic.add(label or verb, args, answers)
        return answers

    def answer(self, verb: str, args: tuple[Any, ...], label: str) -> Any:
        if label == "policy.add_logprobs":
            _, _, (rows, _), arguments, *_ = args
            found = np.full(len(rows) * self.tokens, LOGPROB, np.float32)
            return NewFields(dict.fromkeys(arguments["needs"], found))
        if label == "policy.forward_backward":
            return {"pg_loss": 0.0}
        if label == "policy.optim_step":
            return {"grad_norm": 0.0, "lr": 0.0}
        if verb == "begin_weights":
            self.left = BUCKETS
        if verb == "next_weights":
            self.left -= 1
            return Kept([]) if self.left >= 0 else None
        return None

    def put(self, value: Any) -> Kept:
        return self.traffic.put(value)

    @property
    def remote_put(self) -> Any:
        return Kept

    def close(self) -> None: ...
