"""Load a reward by name, file, URL or function as a verifier of batches."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from r1_rewards.spec import MODEL_REWARDS, SERVICES, open_service, parse_spec
from r1_rewards.types import FailurePolicy, OpenVerifier, RewardSpecError
from r1_rewards.workers.in_process import InProcessVerifier
from r1_rewards.workers.pool import PooledVerifier
from r1_rewards.workers.source import write_function


def load(
    spec: str | Callable[..., object],
    kwargs: Mapping[str, object] | None = None,
    *,
    timeout: float = 30.0,
    failure_score: float = 0.0,
    failure_policy: FailurePolicy = "score",
    workers: int = 1,
    memory_mib: int | None = 4096,
    in_process: bool = False,
) -> OpenVerifier:
    """Return a verifier that runs `spec`; close it after use, or use it in a `with` block.

    `spec` is one of:

    - a built-in verifier ("math"), "path/file.py:function", or a function (also one of a notebook or script). It runs
      in `workers` processes with `timeout` seconds per sample and `memory_mib` each (see `PooledVerifier`);
    - "judge", "reward_model", "remote", or URLs of reward servers. It runs in this process with `timeout` seconds per
      request.

    With `in_process`, a function runs in this process, with `timeout` alone (see `InProcessVerifier`). It may then be a
    lambda, a closure, a method or an object.

    `kwargs` are the verifier's options. `failure_policy` and `failure_score` apply to samples that cannot be scored.
    Raises RewardSpecError if the reward does not exist or does not accept `kwargs`.

    Example: `with load("gsm8k") as verifier: scores = verifier([RewardInput("#### 18", "18")])`
    """
    if isinstance(spec, str):
        parsed = parse_spec(spec)
        if parsed.function in MODEL_REWARDS:
            raise RewardSpecError(f"the reward {spec!r} asks the model that is trained, which only `r1 train` has")
        if parsed.path is None and parsed.function in SERVICES:
            defaults = {"timeout": timeout, "failure_score": failure_score, "failure_policy": failure_policy}
            return open_service(parsed, kwargs or {}, defaults)
    if in_process and callable(spec):
        return InProcessVerifier(
            spec, kwargs, timeout=timeout, failure_score=failure_score, failure_policy=failure_policy
        )
    folder = tempfile.mkdtemp(prefix="r1-reward-") if callable(spec) else None
    try:
        verifier = PooledVerifier(
            write_function(spec, Path(str(folder))) if callable(spec) else spec,
            kwargs,
            timeout=timeout,
            failure_score=failure_score,
            failure_policy=failure_policy,
            workers=workers,
            memory_mib=memory_mib,
        )
    except BaseException:
        if folder:
            shutil.rmtree(folder)
        raise
    if folder:
        weakref.finalize(verifier, shutil.rmtree, folder)
    return verifier
