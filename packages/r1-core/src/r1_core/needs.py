"""What an advantage estimator or a loss can require beyond rewards and current log-probs."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any, Literal, get_args

Need = Literal[
    "groups",  # several answers to each prompt
    "old_logprobs",  # of the policy before the step, for all samples before any gradient
    "rollout_logprobs",  # as the engine sampled
    "squared_probs",  # Σ p² of that policy's distribution at each token
    "full_kl",  # KL of that distribution from the reference's, over the whole vocabulary
    "ref_logprobs",  # of the frozen reference
    "correction_weights",  # of learner against engine, where the run corrects that gap
    "baselines",  # the reward of each prompt's greedy answer, which is sampled for it
    "parts",  # the rewards of each answer one by one
    "values",  # a critic's forecasts
]
# Plain text for the type checker, so that a class may write `needs = ("groups",)`; `read_needs` knows the words.
Needs = Collection[str]

# Who finds it: one forward pass of the policy (which gives the old log-probs whatever it is asked for), and one of the
# reference.
OF_POLICY = frozenset({"old_logprobs", "squared_probs", "full_kl"})
OF_REFERENCE = frozenset({"ref_logprobs"})


def read_needs(value: Any, owner: str) -> tuple[str, ...]:
    """Return the needs that a user's code declares. Raises ValueError, naming `owner`, on an unknown one."""
    words = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)
    for word in words:
        if word not in get_args(Need):
            near = get_close_matches(str(word), get_args(Need), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{owner} needs {word!r}, which is none of {', '.join(get_args(Need))}{hint}")
    return words
