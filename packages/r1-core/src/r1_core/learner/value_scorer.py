"""A language model as a critic: its head forecasts the return before each token, where log-probs would predict it."""

from typing import Any

import torch
from torch import Tensor, nn

from r1_core.learner.microbatch import MicroBatch
from r1_core.learner.token_model import TokenModel


class ValueScorer:
    """Calls a model, whose head has one output, for the values of trained tokens."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._tokens = TokenModel(model)

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return the forecast before each of the batch's trained tokens: [T], float32 or float64.

        Raises ValueError if the head has more than one output.
        """
        outputs = self._tokens.outputs(batch)
        if outputs.shape[-1] != 1:
            raise ValueError(f"the critic's head has {outputs.shape[-1]} outputs, not one; see give_value_head")
        return outputs.squeeze(-1)


def give_value_head(model: Any) -> nn.Linear:
    """Put a Linear(H, 1) in the place of a Hugging Face model's head, and return it.

    Its weights are 0, so that it forecasts 0 until it has learned otherwise: the first advantages are then the returns
    themselves, on every rank and in every run. Raises ValueError if the model does not tell which module its head is.
    """
    old = model.get_output_embeddings()
    if old is None:
        raise ValueError(f"{type(model).__name__} does not tell which module its head is (get_output_embeddings)")
    head = nn.Linear(old.weight.shape[1], 1, device=old.weight.device, dtype=old.weight.dtype)
    model.set_output_embeddings(head)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return head
