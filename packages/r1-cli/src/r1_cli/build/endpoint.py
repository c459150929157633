"""An OpenAI-compatible server as an engine of `r1 sample`: it renders prompts itself, and returns texts."""

import asyncio
import base64
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from r1_data.types import JsonObject, Prompt
from r1_rewards.services.endpoint import HttpEndpoint, Patience, Post, RequestFailed, Unusable, bearer_headers
from r1_rollout.errors import EngineError
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.weights import WeightSource

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("r1")

PICTURES = ("image", "image_url")  # types of a content part
Finish = Literal["stop", "length"]
Reply = tuple[str, Finish]


@dataclass(frozen=True, slots=True)
class EndpointEngine:
    """Asks for one answer a request, with a seed that depends on (seed, prompt id, sample).

    Token ids are those of `tokenizer`, which may differ from the server's, and log-probs are NaN.
    """

    endpoint: HttpEndpoint  # of `/chat/completions`
    model: str  # its name there
    tokenizer: "PreTrainedTokenizerBase"
    replies: "ReplyLog"
    texts: dict[bytes, str] = field(default_factory=dict)  # by the token ids of completions: they may not be reversible

    def load_weights(self, source: WeightSource) -> None:
        raise EngineError("a server of others takes no weights")

    def active(self, source: WeightSource | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[tuple[int, list[Completion]]]:
        """Yield the groups whose answers have all come; the others are logged.

        Raises:
            EngineError: none has.
        """
        self.texts.clear()
        bodies = [[to_body(self.model, one, params, sample) for sample in range(params.n)] for one in prompts]

        async def ask_all(post: Post) -> list[list[Reply | RequestFailed]]:
            return await asyncio.gather(
                *(asyncio.gather(*(ask(post, body, self.replies) for body in of_prompt)) for of_prompt in bodies)
            )

        replies = self.endpoint.run(ask_all)
        failures = [one for group in replies for one in group if isinstance(one, RequestFailed)]
        whole = [index for index, group in enumerate(replies) if not any(isinstance(r, RequestFailed) for r in group)]
        if failures:
            again = "run the same command again to ask for them"
            told = f"{len(prompts) - len(whole)} of {len(prompts)} prompts got no answers ({failures[0]}): {again}"
            if not whole:
                raise EngineError(told)
            log.warning("%s", told)
        for index in whole:
            yield index, [self._complete(reply) for reply in replies[index] if not isinstance(reply, RequestFailed)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text that the server sent. It stands in for the tokenizer's method."""
        return self.texts[np.asarray(token_ids, np.int32).tobytes()]

    def _complete(self, reply: Reply) -> Completion:
        text, finish = reply
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.tokenizer.decode(token_ids) != text:
            token_ids = list(text.encode("utf-8", "replace"))  # one of the tokens unknown to it would stand for many
        completion = Completion(token_ids, np.full(len(token_ids), np.nan, np.float32), finish, 0)
        self.texts[completion.token_ids.tobytes()] = text
        return completion


def open_endpoint(address: str, key_variable: str, concurrency: int, timeout: float) -> HttpEndpoint:
    """Return the client of one or several addresses, with commas between.

    Raises RewardSpecError: an address is invalid, or the key would be sent unencrypted.
    """
    urls = [base.strip().rstrip("/") + "/chat/completions" for base in address.split(",")]
    headers = bearer_headers(urls, key_variable)
    return HttpEndpoint(urls, Patience(timeout, 3 * timeout), headers=headers, concurrency=concurrency)


async def ask(post: Post, body: JsonObject, replies: "ReplyLog") -> Reply | RequestFailed:
    if (known := replies.find(body)) is not None:
        return known
    try:
        reply: Reply = await post(body, read_reply)
    except RequestFailed as error:
        return error
    replies.add(body, reply)
    return reply


class ReplyLog:
    """The replies of a server as lines of JSON, so that no request is repeated after a kill or a failed group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Reply] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            with suppress(ValueError, KeyError):  # the last line of a killed command
                found = json.loads(line)
                self._known[found["request"]] = found["text"], found["finish"]

    def find(self, body: JsonObject) -> Reply | None:
        return self._known.get(self._key(body))

    def add(self, body: JsonObject, reply: Reply) -> None:
        text, finish = reply
        line = json.dumps({"request": self._key(body), "text": text, "finish": finish})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}")  # behind the end of a torn line

    @staticmethod
    def _key(body: JsonObject) -> str:
        return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def to_body(model: str, prompt: Prompt, params: SamplingParams, sample: int) -> JsonObject:
    named = f"{params.seed}:{prompt.id}:{sample}".encode(errors="surrogatepass")
    body: JsonObject = {
        "model": model,
        "messages": to_messages(prompt),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big") >> 33,
    }
    return body | ({"top_k": params.top_k} if params.top_k > 0 else {})  # of vLLM and SGLang


def to_messages(prompt: Prompt) -> list[JsonObject]:
    """Return the messages with pictures as `data:` URLs. Raises EngineError for videos."""
    if prompt.videos:
        raise EngineError(f"{prompt.id}: videos cannot be sent to a server of others")
    pictures = iter(prompt.images)
    return [{**message, "content": _parts(message.get("content"), pictures)} for message in prompt.messages]


def _parts(content: object, pictures: "Iterator[Image]") -> object:
    if not isinstance(content, list):
        return content
    return [_picture(next(pictures)) if part.get("type") in PICTURES else part for part in content]


def _picture(picture: "Image") -> JsonObject:
    content = io.BytesIO()
    picture.save(content, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def read_reply(reply: object) -> Reply:
    """Return text and finish reason. Reasoning that the server sends apart is put before the text, between tags."""
    match reply:
        case {
            "choices": [{"message": {"content": str(text)} as message, "finish_reason": "stop" | "length" as finish}]
        }:
            return _thought(message) + text, finish
    raise Unusable(f"the endpoint sent no text that ended by itself or at the limit: {str(reply)[:120]!r}")


def _thought(message: Mapping[str, object]) -> str:
    found = message.get("reasoning_content") or message.get("reasoning")
    return f"<think>\n{found}\n</think>\n\n" if found else ""
