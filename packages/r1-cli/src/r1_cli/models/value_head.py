"""Critics and reward models from language models: a family's own class with one output, not needed in the files."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from transformers import AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from r1_core.learner.critic import give_value_head
from r1_core.learner.parallel import place_like
from r1_core.reward_model import use_score_head

Head = Literal["value", "score"]  # of a critic, in place of the vocabulary's; of a reward model, as classifiers have it


def with_one_output(head: Head, family: Any, config: PreTrainedConfig, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the class that an Auto class would choose, with a head of one output, and its configuration.

    It has `from_pretrained` and `from_config`. Its head is never tied to the embeddings. Raises ValueError if
    transformers has no class of this family for a reward model.
    """
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    add_head: Callable[[Any], object] = give_value_head
    if head == "score":
        family, add_head, config.num_labels = AutoModelForTokenClassification, use_score_head, 1
    with torch.device("meta"):
        own = type(family.from_config(config, trust_remote_code=trust_remote_code))

    class OneOutput(own):  # type: ignore[misc, valid-type]
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            add_head(self)

        @classmethod
        def from_config(cls, config: PreTrainedConfig, trust_remote_code: bool = False) -> Any:
            return cls._from_config(config)

    # The loader knows families by the names and modules of their classes.
    OneOutput.__name__, OneOutput.__qualname__, OneOutput.__module__ = own.__name__, own.__qualname__, own.__module__
    return OneOutput, config


@torch.no_grad()
def initialize_head(head: Head, model: PreTrainedModel, info: Mapping[str, set[Any]]) -> dict[str, set[Any]]:
    """Initialize the head unless the files had all of it; return the loader's report without the head.

    A critic's head is 0. That of a reward model is drawn from N(0, 1 / (hidden size + 1)) (arXiv 2009.01325), always
    the same, because layouts cannot be compared by values of 0.
    """
    outputs = model.get_output_embeddings()
    own = {name for name, one in model.named_parameters() if any(one is other for other in outputs.parameters())}
    missing = {name for name in info["missing_keys"] if name not in own}
    mismatched = {entry for entry in info["mismatched_keys"] if entry[0] not in own}
    if (missing, mismatched) != (set(info["missing_keys"]), set(info["mismatched_keys"])):
        for parameter in outputs.parameters():
            parameter.zero_()
            if head == "score":
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                parameter.copy_(place_like(drawn / math.sqrt(parameter.shape[-1] + 1), parameter))
    return {**info, "missing_keys": missing, "mismatched_keys": mismatched}


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence Hugging Face's warning that a vocabulary head does not fit; other problems are raised."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
