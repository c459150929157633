"""AdamW with bfloat16 weights and states that still accumulates updates far below a weight's last digit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from r1_core.learner.parallel import local_part

STATES = ("exp_avg", "exp_avg_sq", "compensation")
# Elements taken at a time: the float32 values in between are temporary, so they should stay few.
CHUNK = 1 << 24


class AdamWBF16(Optimizer):
    """AdamW (arXiv 1711.05101) in 8 bytes per weight and 2 for its gradient, instead of 12 and 4.

    Parameters and states are bfloat16, sharded (DTensor) or not: both moments and `compensation`, the rounding error of
    each weight. Updates use compensated (Kahan) summation (arXiv 2010.06192): weight + compensation is the weight that
    float32 would hold.

    A bfloat16 second moment that should fall by 0.1% would be rounded back forever, so states are rounded up or down,
    right on average. The step number decides the direction, so resuming and the number of ranks change no bit.

    Raises ValueError if a parameter is not bfloat16.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype != torch.bfloat16:
                raise ValueError(f"AdamWBF16 takes bfloat16 only; one of shape {[*param.shape]} is {param.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, group)
        return loss

    def _step_one(self, param: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update({name: torch.zeros_like(param) for name in STATES})
        state["step"] += 1
        step = int(state["step"].item())
        tensors = [torch.atleast_1d(local_part(t)) for t in (param, param.grad, *(state[name] for name in STATES))]
        rows = max(1, CHUNK // max(1, tensors[0][:1].numel()))
        for pieces in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            _update(pieces, step, group)


def _update(pieces: Sequence[Tensor], step: int, group: Mapping[str, Any]) -> None:
    """AdamW in float32 on (parameter, gradient, *STATES) of one shape, changed in place."""
    param, grad, exp_avg, exp_avg_sq, compensation = pieces
    lr, betas = group["lr"], group["betas"]
    gradient, value = grad.float(), param.float()
    first = exp_avg.float().lerp_(gradient, 1 - betas[0])
    second = exp_avg_sq.float().mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    scale = second.sqrt().div_((1 - betas[1] ** step) ** 0.5).add_(group["eps"])
    # Small numbers are added to each other before they meet the weight, where they would lose their digits.
    rest = compensation.float().add_(value, alpha=-lr * group["weight_decay"])
    rest.addcdiv_(first, scale, value=-lr / (1 - betas[0] ** step))
    param.copy_(value + rest)
    rest.add_(value.sub_(param))
    for state, exact in ((exp_avg, first), (exp_avg_sq, second), (compensation, rest)):
        state.copy_(_round(exact, step))


def _round(tensor: Tensor, step: int) -> Tensor:
    """Round float32 numbers in place to bfloat16 values, up as often as they are near the upper neighbour.

    A number is rounded up if its lower 16 bits plus a threshold reach 2^16. Thresholds are multiples of 40503 (2^16
    over the golden ratio) modulo 2^16, so they are spread evenly.
    """
    tensor.view(torch.int32).add_(step * 40503 % 65536).bitwise_and_(-65536)
    return tensor
