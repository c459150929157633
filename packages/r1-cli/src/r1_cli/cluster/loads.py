"""How evenly the tokens of a step's updates lie on the ranks: what `perf/straggler` and `global_seqlen` tell."""

from collections.abc import Sequence

from r1_core.learner.batching import Batching, rounds
from r1_core.prompts import SharedPrompts
from r1_core.types import Sample


class Loads:
    """Tokens that each of the ranks computes, added up over the updates of a step.

    Example: of samples of 5, 3 and 2 tokens, one a micro-batch, two ranks compute 5 and 3 in the first round and 2 and
    0 in the second: `tokens` are [7, 3], and `straggler` is (5 + 2) / 5.
    """

    def __init__(self, ranks: int) -> None:
        """`ranks` counts those that have samples of their own."""
        self.tokens = [0] * ranks
        self._fullest = 0  # of the fullest rank, round by round: all wait for it

    def add(self, samples: Sequence[Sample], batching: Batching) -> None:
        """Note an update of these samples: a prompt that a micro-batch shares counts once."""
        padded, share = not batching.padding_free, batching.share_prompts
        work = SharedPrompts.find(samples, share and not padded)
        limit = batching.cap(batching.update)
        for parts in rounds(samples, limit, len(self.tokens), padded=padded, share_prompts=share):
            loads = [work.tokens(part) for part in parts]
            self.tokens = [total + load for total, load in zip(self.tokens, loads, strict=True)]
            self._fullest += max(loads)

    @property
    def straggler(self) -> float:
        """Tokens of the fullest rank, round by round, to the mean one's; 1 where nothing was computed."""
        return self._fullest * len(self.tokens) / sum(self.tokens) if sum(self.tokens) else 1.0
