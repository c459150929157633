"""Log-probs of chosen tokens, and the entropy of the distributions they were drawn from."""

import torch
from torch import Tensor

from r1_core.types import check_tensors


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob [T] of each target [T] under softmax(logits [T, V] / temperature); entropy [T] in nats if asked for.

    Computed in float32 (half precision loses about three digits of the ratio), in float64 if the logits are. The
    entropy carries a gradient only with `entropy_gradient`, which keeps another tensor of the logits' size. Raises
    ValueError unless the temperature is above 0.
    """
    check_tensors("token_logprobs", "[T, V]", logits=logits)
    check_tensors("token_logprobs", "[T]", logits.shape[:1], targets=targets)
    if targets.dtype != torch.int64:
        raise ValueError(f"token_logprobs: targets has dtype {targets.dtype}, expected torch.int64")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    logprobs = chosen - logits.logsumexp(-1)
    if not with_entropy:
        return logprobs, None
    if entropy_gradient:
        # A banned token (logit −inf) adds nothing, and 0·inf must not reach the gradient.
        every = logits.log_softmax(-1)
        return logprobs, -(every.exp() * torch.where(every.isneginf(), 0.0, every)).sum(-1)
    with torch.no_grad():
        # entr(p) = −p log p with entr(0) = 0, so a banned token (logit −inf) adds nothing.
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return logprobs, entropy
