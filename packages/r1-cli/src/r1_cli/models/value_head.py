"""Critics from language models: a family's own class with a head of one output, which need not be in the files."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from r1_core.learner.critic import give_value_head


def with_value_head(family: Any, config: PreTrainedConfig, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the class that an Auto class would choose, with a value head, and its configuration.

    It has `from_pretrained` and `from_config`. Its head is never tied to the embeddings.
    """
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    with torch.device("meta"):
        own = type(family.from_config(config, trust_remote_code=trust_remote_code))

    class Critic(own):  # type: ignore[misc, valid-type]
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            give_value_head(self)

        @classmethod
        def from_config(cls, config: PreTrainedConfig, trust_remote_code: bool = False) -> Any:
            return cls._from_config(config)

    # The loader knows families by the names and modules of their classes.
    Critic.__name__, Critic.__qualname__, Critic.__module__ = own.__name__, own.__qualname__, own.__module__
    return Critic, config


@torch.no_grad()
def initialize_value_head(model: PreTrainedModel, info: Mapping[str, set[Any]]) -> dict[str, set[Any]]:
    """Set the head to 0 unless the files had all of it; return the loader's report without the head.

    Only a critic's files have a value head.
    """
    head = model.get_output_embeddings()
    own = {name for name, parameter in model.named_parameters() if any(parameter is one for one in head.parameters())}
    missing = {name for name in info["missing_keys"] if name not in own}
    mismatched = {entry for entry in info["mismatched_keys"] if entry[0] not in own}
    if (missing, mismatched) != (set(info["missing_keys"]), set(info["mismatched_keys"])):
        for parameter in head.parameters():
            parameter.zero_()
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
