"""How many micro-batches a device computes, and of how many tokens, where answers share their prompts or do not."""

from r1_cli.config import RunConfig
from r1_cli.config.actor import UpdateConfig
from r1_cli.config.root import Owner


def count_tokens(config: RunConfig, prompts: int, owner: Owner = "actor") -> int:
    """Return the tokens that are computed of so many prompts with all their answers, at most."""
    data, n = config.data, config.worker.rollout.n
    times = 1 if _trained(config, owner).shares_prompts else n
    return prompts * (times * data.max_prompt_length + n * data.max_response_length)


def count_micro_batches(config: RunConfig, prompts: int, size: int, owner: Owner = "actor") -> int:
    """Return how many micro-batches of `size` sequences a device computes of so many prompts with all their answers.

    With dynamic batching, by the tokens of so many full sequences, these are the most that it may be. What is dealt out
    where prompts are shared is a whole group, or as much of one as goes into a micro-batch
    (`r1_core.learner.batching.split_groups`).
    """
    n, replicas = config.worker.rollout.n, config.data_ranks(owner)
    if not _trained(config, owner).shares_prompts:
        return _ceil(prompts * n // replicas, size)
    most = _most_answers(config, size, owner)
    whole, rest = divmod(n, most)
    if rest == 0:
        return _ceil(prompts * whole, replicas)
    if _trained(config, owner).dynamic_batching and whole:
        return _ceil(prompts * (whole + 1), replicas)
    return _ceil(prompts * whole + _ceil(prompts, _groups(config, size, rest, owner)), replicas)


def count_micro_batch_tokens(config: RunConfig, size: int, owner: Owner = "actor") -> int:
    """Return the most tokens of a micro-batch of `size` sequences."""
    data, n, trained = config.data, config.worker.rollout.n, _trained(config, owner)
    if trained.dynamic_batching or not trained.shares_prompts:
        return size * (data.max_prompt_length + data.max_response_length)
    rest = n % size
    prompts = _groups(config, size, rest, owner) if rest else 1
    return prompts * data.max_prompt_length + size * data.max_response_length


def _most_answers(config: RunConfig, size: int, owner: Owner) -> int:
    """Return how many answers to one prompt a micro-batch has room for."""
    data = config.data
    if not _trained(config, owner).dynamic_batching:
        return size
    room = size * (data.max_prompt_length + data.max_response_length)
    return max((room - data.max_prompt_length) // data.max_response_length, 1)


def _groups(config: RunConfig, size: int, answers: int, owner: Owner) -> int:
    """Return how many prompts with so many answers a micro-batch has room for."""
    data = config.data
    if not _trained(config, owner).dynamic_batching:
        return size // answers
    room = size * (data.max_prompt_length + data.max_response_length)
    return max(room // (data.max_prompt_length + answers * data.max_response_length), 1)


def _trained(config: RunConfig, owner: Owner) -> UpdateConfig:
    trained: UpdateConfig = getattr(config.worker, owner)
    return trained


def _ceil(total: int, size: int) -> int:
    return -(-total // size)
