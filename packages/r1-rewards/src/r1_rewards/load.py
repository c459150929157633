"""Turn `math` or `path/file.py:function` into a verifier that scores batches."""

from collections.abc import Mapping
from typing import Any

from r1_rewards.pool import PooledVerifier


def load(
    spec: str,
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float = 30.0,
    failure_score: float = 0.0,
    workers: int = 1,
) -> PooledVerifier:
    """Return a verifier that runs `spec` in worker processes; close it after use, or use it in a `with` block.

    `spec` is "math", "r1v", "gsm8k" or "path/file.py:function"; `kwargs` are passed to a user's function as keywords;
    `timeout` is in seconds per sample; see `PooledVerifier` for how failures are scored. Raises RewardSpecError, with
    the nearest name or what the file has, if the reward does not exist or does not take `kwargs`.

    Example: `with load("gsm8k") as verifier: scores = verifier([RewardInput("#### 18", "18")])`
    """
    return PooledVerifier(spec, kwargs, timeout=timeout, failure_score=failure_score, workers=workers)
