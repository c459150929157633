"""Search passages with a retrieval server that speaks Search-R1's protocol (arXiv 2503.09516)."""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, Any

MAX_REPLY_BYTES = 8 << 20
TRIES = 3
PAUSE = 0.5  # seconds before the second try; doubles
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def search(query: str, *, url: str = "http://127.0.0.1:8000/retrieve", topk: int = 3, timeout: float = 10.0) -> str:
    """Search a collection of texts and return the passages that fit best.

    Args:
        query: What to search for.
    """
    # The server gets {"queries", "topk", "return_scores"} and answers {"result": [[{"document": {"contents"}}]]}.
    if not url.startswith(("http://", "https://")):
        raise ValueError("the url of the search is no http address")
    body = {"queries": [query.encode("utf-8", "replace").decode()], "topk": topk, "return_scores": True}
    reply = post(url, body, timeout)
    try:
        passages = [_contents(passage) for passage in reply["result"][0]][:topk]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError("the search server's answer has no passages in result[0]") from error
    return "".join(_written(number, contents) for number, contents in enumerate(passages, 1)) or "no passages found"


def post(url: str, body: object, timeout: float) -> Any:
    """Return the JSON answer; connection errors, 429 and 5xx are tried again. Raises OSError or ValueError."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    if urllib.parse.urlsplit(url).hostname in _LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    opener = urllib.request.build_opener(*handlers)
    for tries_left in range(TRIES - 1, -1, -1):
        try:
            with opener.open(request, timeout=timeout) as response:
                data = response.read(MAX_REPLY_BYTES + 1)
            if len(data) > MAX_REPLY_BYTES:
                raise ValueError(f"the search server's answer is over {MAX_REPLY_BYTES:,} bytes")
            return json.loads(data)
        except urllib.error.HTTPError as error:
            if not tries_left or (error.code != 429 and error.code < 500):
                raise OSError(f"the search server answered {error.code}") from error
        except (OSError, http.client.HTTPException) as error:
            if not tries_left:
                raise OSError("the search server cannot be reached") from error
        time.sleep(PAUSE * 2 ** (TRIES - 1 - tries_left))
    raise AssertionError


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: object, newurl: str
    ) -> None:
        return None


def _contents(passage: Any) -> str:
    return str(passage["document"]["contents"] if "document" in passage else passage["contents"])


def _written(number: int, contents: str) -> str:
    """As Search-R1 shows a passage, whose first line is its title."""
    title, _, text = contents.partition("\n")
    return f"Doc {number}(Title: {title}) {text}\n"
