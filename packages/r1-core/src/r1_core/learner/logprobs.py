"""Log-probs of chosen tokens: from logits, with the entropy, and by a model's own forward of one sample."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from r1_core.learner.parallel import find_blocks
from r1_core.types import Sample, check_tensors, join_inputs


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs [T] of targets [T] under softmax(logits [T, V] / temperature), and entropies [T] in nats.

    The entropy is None unless `with_entropy`; its gradient (`entropy_gradient`) keeps another tensor of the logits'
    size. Computes in float32, because half precision loses about three digits of the ratio, or float64 if the logits
    are. Raises ValueError unless the temperature is above 0.
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
        # A banned token (logit −inf) adds nothing; 0·inf must not reach the gradient.
        every = logits.log_softmax(-1)
        return logprobs, -(every.exp() * torch.where(every.isneginf(), 0.0, every)).sum(-1)
    with torch.no_grad():
        # entr(p) = −p log p with entr(0) = 0, so a banned token (logit −inf) adds nothing.
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return logprobs, entropy


# --- a model's own computation, to compare with -----------------------------------------------------------------------


def compute_eager_logprobs(
    model: Any, samples: Sequence[Sample], temperature: float = 1.0, noise: torch.dtype | None = None
) -> list[list[float]]:
    """Return the log-probs of each sample's trained tokens; see `compute_eagerly`.

    Without `noise` the gradient of the shortest sample is computed, too. Raises what the model's own code does if it
    has none.
    """
    if noise is None and samples:
        with eager_attention(model):
            _require_gradient(model, min(samples, key=lambda sample: len(sample.token_ids)))
    return compute_eagerly(
        model, samples, lambda logits, targets: token_logprobs(logits, targets, temperature)[0], noise
    )


def compute_eagerly(
    model: Any,
    samples: Sequence[Sample],
    read: Callable[[Tensor, Tensor], Tensor],
    noise: torch.dtype | None = None,
) -> list[list[float]]:
    """Return a number per trained token, by the model's own eager forward of each sample alone.

    Independent of r1's masks, attention, head and positions, except positions of several axes. `noise`: see
    `rounding_noise`.

    Args:
        read: makes numbers [T] of the outputs [T, V] before the trained tokens, and of these tokens [T].
    """
    with eager_attention(model), nullcontext() if noise is None else rounding_noise(model, noise):
        return [_read_alone(model, sample, read) for sample in samples]


@torch.no_grad()
def _read_alone(model: Any, sample: Sample, read: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    found: list[float] = read(*_compute_alone(model, sample)).tolist()
    return found


def _compute_alone(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    whole = join_inputs([sample.model_inputs, sample.later_inputs])
    inputs = {name: value.to(device) for name, value in whole.items()}
    if sample.position_ids.shape[0] > 1:
        inputs["position_ids"] = sample.position_ids[1:, None].to(device)
    logits = model(input_ids=sample.token_ids[None].long().to(device), **inputs, use_cache=False).logits[0]
    predictors = sample.loss_mask[1:].nonzero().squeeze(-1).to(device)
    targets = sample.token_ids[sample.loss_mask].long().to(device)
    return logits[predictors], targets


@torch.no_grad()
def count_features(model: Any, sample: Sample) -> int | None:
    """Return how many features the model computes of a sample's pictures, in its own eager forward.

    None if it calls no `get_image_features`, as Hugging Face's models do. A forward that fails behind this call, as
    most do where the placeholders are not as many, is no error.
    """
    found: list[int] = []
    holders = [module for module in model.modules() if hasattr(type(module), "get_image_features")]
    for holder in holders:
        holder.get_image_features = _counting(holder.get_image_features, found)
    try:
        with eager_attention(model):
            _compute_alone(model, sample)
    except (LookupError, RuntimeError, TypeError, ValueError):
        if not found:
            raise
    finally:
        for holder in holders:
            del holder.get_image_features
    return found[0] if found else None


def _counting(get_features: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
    def count(*args: Any, **kwargs: Any) -> Any:
        output = get_features(*args, **kwargs)
        features = getattr(output, "pooler_output", output)
        parts = [features] if isinstance(features, Tensor) else features
        if isinstance(parts, list | tuple) and all(isinstance(part, Tensor) for part in parts):
            found.append(sum(part.shape[:-1].numel() for part in parts))
        return output

    return count


def _require_gradient(model: Any, sample: Sample) -> None:
    """Compute the gradient of a trained parameter that the forward uses first, and so back through every layer."""
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    with torch.enable_grad(), _gradients_set_aside(model) if sharded else nullcontext():
        total = _compute_alone(model, sample)[0].sum()
        if sharded and total.requires_grad:  # its parameters are in no graph, and all ranks gather them
            total.backward()
            return
        # Breadth first, so the forward's first operations come last.
        nodes: dict[Any, None] = dict.fromkeys([total.grad_fn])
        for node in (queue := list(nodes)):
            found = [before for before, _ in node.next_functions if before is not None] if node else []
            queue.extend(before for before in found if before not in nodes)
            nodes.update(dict.fromkeys(found))
        if parameters := [node.variable for node in nodes if hasattr(node, "variable")]:
            torch.autograd.grad(total, parameters[-1])


@contextmanager
def _gradients_set_aside(model: nn.Module) -> Iterator[None]:
    """Leave the gradients as they were before a backward pass, which FSDP2 adds to them."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Use a Hugging Face model's own `eager` attention inside; other models stay as they are."""
    if not hasattr(model, "set_attn_implementation"):
        yield
        return
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    before = {name: part._attn_implementation for name, part in {"": model.config, **parts}.items() if part is not None}
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def rounding_noise(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Change each layer's output by up to one unit in the last place of `dtype`, to see how log-probs react."""
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(dtype).eps

    def disturb(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            return None
        noise = 2 * torch.rand(hidden.shape, generator=generator, dtype=torch.float64) - 1
        changed = (hidden.double() * (1 + unit * noise.to(hidden.device))).to(hidden.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    hooks = [block.register_forward_hook(disturb) for block in find_blocks(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
