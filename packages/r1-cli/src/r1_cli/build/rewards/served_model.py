"""Read log-probs of a model behind HTTP: any server with OpenAI's completions in vLLM's form.

Prompts with pictures use vLLM's `/inference/v1/generate` (`vllm serve --enable-scale-out`), all others
`/v1/completions` with `echo` and `prompt_logprobs`. Requests hold token ids, so that no tokenizer splits them again.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from r1_rewards.services.endpoint import HttpEndpoint, Patience, Post, RequestFailed, Unusable, bearer_headers
from r1_rollout.types import PromptLike
from r1_rollout.vllm.servers.protocol import GENERATE, read_body

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

COMPLETIONS = "/v1/completions"
TOKENIZE = "/tokenize"
PLAIN = {"add_special_tokens": False}
LEAST = -9999.0  # what vLLM writes for a log-prob of minus infinity, which JSON has not
ROUNDING = 1e-3  # by which a log-prob may be above 0, and a sum of probabilities above 1
NO_LOGPROBS = "these are logits and no log-probs, so start it without --logprobs-mode, or with raw_logprobs"
Query = tuple[PromptLike, "Tokens", int]

log = logging.getLogger("r1")


class ServedReading:
    """Sends one request per response, concurrently. A response without an answer gets an empty row.

    Servers compute prompt log-probs at temperature 1 only.
    """

    concurrent = True

    def __init__(
        self,
        urls: str,
        *,
        served_name: str | None = None,
        token_env: str = "OPENAI_API_KEY",
        concurrency: int = 16,
        patience: Patience | None = None,
    ) -> None:
        """Store the endpoints.

        Args:
            urls: equal servers, separated by commas, with or without `/v1`.
            served_name: the model's name there; None if the server has only one.
            token_env: the environment variable of a bearer token, sent if it is set.

        Raises:
            RewardSpecError: an address is invalid, or the token would be sent unencrypted.
        """
        self.bases = bases = [url.strip().rstrip("/").removesuffix("/v1") for url in urls.split(",")]
        self._headers = bearer_headers(bases, token_env)
        self._patience, self._concurrency = patience or Patience(), concurrency
        self._endpoints = {path: self._endpoint(bases, path) for path in (COMPLETIONS, GENERATE)}
        self._named = {"model": served_name} if served_name else {}
        self._told: set[str] = set()

    def _endpoint(self, bases: Sequence[str], path: str) -> HttpEndpoint:
        urls = [base + path for base in bases]
        return HttpEndpoint(urls, self._patience, headers=self._headers, concurrency=self._concurrency)

    def tokenize(self, base: str, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids that a server of `bases` gives these texts. Raises RequestFailed if it does not."""

        async def tokenize_all(post: Post) -> list[list[int]]:
            return await asyncio.gather(*(post({**self._named, "prompt": one, **PLAIN}, read_ids) for one in texts))

        return self._endpoint([base], TOKENIZE).run(tokenize_all)

    def max_length(self, base: str) -> int | None:
        """Return the most tokens that a server of `bases` reads; None if it does not say so at `/tokenize`."""

        async def ask(post: Post) -> object:
            return await post({**self._named, "prompt": "a", **PLAIN}, lambda reply: reply)

        try:
            reply = self._endpoint([base], TOKENIZE).run(ask)
        except RequestFailed:
            return None
        found = reply.get("max_model_len") if isinstance(reply, Mapping) else None
        return found if isinstance(found, int) and found > 0 else None

    def try_top(self, base: str, token_ids: Sequence[int], count: int) -> None:
        """Ask a server of `bases` for its most likely tokens. Raises RequestFailed if it gives none."""
        total, tokens = len(token_ids), list(token_ids[1:])
        body = self._named | _echo(token_ids, count)
        read = partial(read_tail, tokens=tokens, total=total, count=count)

        async def ask(post: Post) -> list[list[float]]:
            return await post(body, read)

        self._endpoint([base], COMPLETIONS).run(ask)

    def read_logprobs(
        self,
        prompts: Sequence[PromptLike],
        responses: "Sequence[Tokens]",
        starts: Sequence[int],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        return [row.flatten().tolist() for row in self._read(prompts, responses, starts, temperature, 0)]

    def read_top(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", count: int, temperature: float
    ) -> list[Tensor]:
        """Return of each response's tokens the log-prob, those of the `count` most likely ones, and their ids.

        Each float64 [n, 1 + 2 · count], [0] without an answer; −inf and −1 where a server lists fewer.
        """
        return self._read(prompts, responses, [0] * len(prompts), temperature, count)

    def _read(
        self,
        prompts: Sequence[PromptLike],
        responses: "Sequence[Tokens]",
        starts: Sequence[int],
        temperature: float,
        count: int,
    ) -> list[Tensor]:
        if temperature != 1.0:
            raise ValueError(f"a server gives log-probs at temperature 1, not at {temperature}")
        queries = list(zip(prompts, responses, starts, strict=True))
        found = [torch.empty(0)] * len(queries)
        for path, endpoint in self._endpoints.items():
            own = [place for place, one in enumerate(queries) if (path == GENERATE) == bool(one[0].model_inputs)]
            if own:
                rows = endpoint.run(partial(self._ask_all, path, [queries[place] for place in own], count))
                for place, row in zip(own, rows, strict=True):
                    found[place] = row
        return found

    async def _ask_all(self, path: str, queries: Sequence[Query], count: int, post: Post) -> list[Tensor]:
        return await asyncio.gather(*(self._ask(path, one, count, post) for one in queries))

    async def _ask(self, path: str, one: Query, count: int, post: Post) -> Tensor:
        prompt, response, start = one
        tokens = [int(token) for token in response]
        body = read_body(prompt, tokens, count) if path == GENERATE else _echo([*prompt.token_ids, *tokens], count)
        total = len(prompt.token_ids) + len(tokens)
        read = partial(read_tail, tokens=tokens[start:], total=total, count=count)
        try:
            return torch.tensor(await post(self._named | body, read), dtype=torch.float64)
        except RequestFailed as error:
            if error.cause not in self._told:
                self._told.add(error.cause)
                log.warning("no log-probs of an answer, and perhaps of more: %s", error)
            return torch.empty(0)


def _echo(token_ids: Sequence[int], count: int) -> dict[str, Any]:
    return {
        "prompt": [*map(int, token_ids)],
        "max_tokens": 1,
        "temperature": 0.0,
        "echo": True,
        "logprobs": 0,
        "prompt_logprobs": count,
    }


def read_ids(reply: object) -> list[int]:
    """Return the token ids of a server's reply to `/tokenize`. Raises Unusable if it has none."""
    found = reply.get("tokens") if isinstance(reply, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
        raise Unusable(f"the reply has no token ids: {str(reply)[:80]!r}")
    return found


def read_tail(reply: object, *, tokens: Sequence[int], total: int, count: int = 0) -> list[list[float]]:
    """Return of the last `tokens` of `total` the log-prob, those of the `count` most likely ones, and their ids.

    Raises Unusable if a server's reply has none, or is about other tokens.
    """
    if not isinstance(reply, Mapping) or not isinstance(reply.get("choices"), list) or not reply["choices"]:
        raise Unusable(f"the reply has no choices: {str(reply)[:80]!r}")
    choice = reply["choices"][0]
    listed = choice.get("prompt_logprobs") or reply.get("prompt_logprobs")
    if listed is None and count:
        raise Unusable("the reply has no prompt_logprobs, which list a teacher's most likely tokens")
    if listed is None:
        echoed = (choice.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(echoed, list) or len(echoed) < total:
            raise Unusable("the reply has neither prompt_logprobs nor the echo's token_logprobs")
        return [[_number(value)] for value in echoed[total - len(tokens) : total]]
    if len(listed) != total:
        raise Unusable(f"the server has read {len(listed)} tokens, not {total}: another tokenizer, or pictures resized")
    rows = listed[total - len(tokens) :]
    return [[_of_token(row, token), *_most_likely(row, count)] for row, token in zip(rows, tokens, strict=True)]


def _of_token(row: object, token: int) -> float:
    if not isinstance(row, Mapping) or str(token) not in row:
        raise Unusable(f"the server has no log-prob of token {token} in its place, as if it had read another")
    return _logprob(row[str(token)])


def _most_likely(row: Mapping[str, object], count: int) -> list[float]:
    """Return `count` log-probs, the largest first, and as many ids; servers list the token itself as well."""
    found = sorted(((_logprob(value), int(token)) for token, value in row.items()), reverse=True)[:count]
    if math.fsum(math.exp(value) for value, _ in found) > 1 + ROUNDING:
        raise Unusable(f"the probabilities of {len(found)} tokens add up to more than 1: {NO_LOGPROBS}")
    found += [(-math.inf, -1)] * (count - len(found))
    return [*(value for value, _ in found), *(float(token) for _, token in found)]


def _logprob(found: object) -> float:
    return _number(found.get("logprob") if isinstance(found, Mapping) else found)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise Unusable(f"a log-prob is {str(value)[:40]!r}, no number")
    if value > ROUNDING:
        raise Unusable(f"a log-prob is {value:g}, above 0: {NO_LOGPROBS}")
    return -math.inf if value <= LEAST else float(value)
