"""What an advantage estimator or a loss can require beyond rewards and current log-probs."""

import ast
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

# Plain text for the type checker, so that a class may write `needs = ("groups",)`; `read_needs` checks the words.
Needs = Collection[str]

# Needs that are no per-token field: several answers to each prompt; weights of learner against engine, where the run
# corrects that gap; the reward of each prompt's greedy answer, which is sampled for it; several rewards of each answer;
# the number of each token's turn, and a hash of the state that the turn started from (single answers are one turn).
OTHERS = ("groups", "correction_weights", "baselines", "parts", "turns", "states")
# Per-token fields that no word is for: results of an estimator, a loss or its forward pass, what every estimator gets,
# what `turns` and `states` are made of, and what a forward pass is given.
NO_NEEDS = {
    "entropies", "advantages", "returns", "weights", "selected", "token_rewards", "turn_ids", "state_ids",
    "teacher_logprobs", "teacher_top", "teacher_top_ids", "routed_experts",
}  # fmt: skip

# One forward pass of the policy computes these (and the old log-probs always), one of the reference or teacher those.
OF_POLICY = frozenset({"old_logprobs", "squared_probs", "full_kl"})
OF_REFERENCE = frozenset({"ref_logprobs"})
OF_TEACHER = frozenset({"teacher_logprobs", "teacher_top"})


@cache
def all_needs() -> tuple[str, ...]:
    """Return all needs; reads the per-token fields of `types.Sample` without importing torch."""
    tree = ast.parse((Path(__file__).parent / "types.py").read_text(encoding="utf-8"))
    sample = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Sample")
    optional = [line for line in sample.body if isinstance(line, ast.AnnAssign) and line.value is not None]
    per_token = [ast.unparse(line.target) for line in optional if ast.unparse(line.annotation) == "Tensor | None"]
    return (*OTHERS, *(name for name in per_token if name not in NO_NEEDS))


def read_needs(value: Any, owner: str) -> tuple[str, ...]:
    """Return the needs that a user's code declares. Raises ValueError on an unknown one."""
    words = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)
    for word in words:
        if word not in all_needs():
            near = get_close_matches(str(word), all_needs(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{owner} needs {word!r}, which is none of {', '.join(all_needs())}{hint}")
    return words
