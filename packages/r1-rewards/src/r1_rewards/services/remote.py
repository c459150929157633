"""Ask a reward server over HTTP: OpenRLHF's and LMM-R1's protocol, or that of `r1-rewards serve`."""

import asyncio
from collections.abc import Sequence

from r1_rewards.services.endpoint import HttpEndpoint, Patience, Post, RequestFailed, bearer_headers
from r1_rewards.services.protocols import PROTOCOLS
from r1_rewards.types import (
    Failure,
    FailurePolicy,
    FailureRule,
    OpenVerifier,
    Outcome,
    RewardInput,
    RewardSpecError,
    Score,
    check_inputs,
    suggest,
)

TOKEN_VARIABLE = "R1_REWARDS_TOKEN"


class RemoteVerifier(OpenVerifier):
    """A verifier that runs on reward servers.

    A batch is split into requests of `batch_size` responses, balanced over the servers and retried as in
    `HttpEndpoint`. A request that a server refuses or answers in a wrong shape is halved until only the faulty
    responses fail. Failed responses have an `error`: `timeout`, `remote` (unreachable, an HTTP error), `wrong_shape`
    (not JSON, not one reward per response), `non_finite`, or what the server reports.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        protocol: str = "openrlhf",
        batch_size: int = 64,
        concurrency: int = 8,
        timeout: float = 180.0,
        deadline: float = 600.0,
        tries: int = 5,
        backoff: float = 0.5,
        token_env: str = TOKEN_VARIABLE,
        failure_score: float = 0.0,
        failure_policy: FailurePolicy = "score",
    ) -> None:
        """Check the settings without sending a request. Raises RewardSpecError.

        `urls` are one or several, also with commas between. `protocol` is "openrlhf" or "r1" (`POST …/score` of
        `r1-rewards serve`). `concurrency` is requests at a time per server; `timeout` seconds per try, `deadline`
        seconds per request. The environment variable `token_env` may have a bearer token, which is
        sent to https:// and to this machine only.
        """
        if protocol not in PROTOCOLS:
            raise RewardSpecError(f"no protocol {protocol!r}" + suggest(protocol, PROTOCOLS))
        if batch_size < 1:
            raise RewardSpecError(f"batch_size must be at least 1, got {batch_size}")
        listed = [url.strip() for url in (urls.split(",") if isinstance(urls, str) else urls)]
        self._endpoint = HttpEndpoint(
            listed,
            Patience(timeout, deadline, tries, backoff),
            headers=bearer_headers(listed, token_env),
            concurrency=concurrency,
        )
        self._protocol = PROTOCOLS[protocol]
        self._batch_size = batch_size
        self._rule = FailureRule(failure_policy, failure_score)

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        check_inputs(inputs)
        if not inputs:
            return []
        size = self._batch_size
        slices = [inputs[first : first + size] for first in range(0, len(inputs), size)]

        async def ask_all(post: Post) -> list[list[Outcome]]:
            return await asyncio.gather(*(self._ask(post, part) for part in slices))

        outcomes = self._endpoint.run(ask_all)
        return [
            self._rule.apply("remote", i, outcome)
            for i, outcome in enumerate(outcome for part in outcomes for outcome in part)
        ]

    def close(self) -> None:
        self._endpoint.close()

    async def _ask(self, post: Post, inputs: Sequence[RewardInput]) -> list[Outcome]:
        try:
            return await post(self._protocol.encode(inputs), lambda reply: self._protocol.decode(reply, len(inputs)))
        except RequestFailed as error:
            if not error.refused or len(inputs) == 1:
                return [Failure(error.cause, str(error)) for _ in inputs]
        middle = len(inputs) // 2
        first, second = await asyncio.gather(self._ask(post, inputs[:middle]), self._ask(post, inputs[middle:]))
        return first + second


def score(response: str, ground_truth: str, *, url: str, prompt: str = "", protocol: str = "openrlhf") -> Score:
    """Return the reward server's score of one response.

    Example: `score("so #### 18", "18", url="http://127.0.0.1:5000/get_reward").value` is 1.0 with `r1-rewards serve
    gsm8k` running.
    """
    with RemoteVerifier(url, protocol=protocol) as verifier:
        return verifier([RewardInput(response, ground_truth, prompt=prompt)])[0]
