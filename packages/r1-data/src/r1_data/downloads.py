"""Download over http and https with one deadline for the whole response, headers included.

A socket's own timeout restarts with each read. These imports are slow and few rows need them.
"""

import io
import time
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from r1_data.types import MediaError


def open_url(address: str, seconds: float) -> Any:
    """Send a request and return the response; its reads raise TimeoutError once `seconds` are over.

    Raises MediaError on a redirect to another scheme than http or https, else OSError, ValueError or HTTPException.
    """
    end = time.monotonic() + seconds

    class WebOnly(HTTPRedirectHandler):
        def redirect_request(self, *args: Any) -> Any:
            if urlsplit(args[-1]).scheme not in ("http", "https"):
                raise MediaError(f"{address}: redirected to {args[-1][:80]!r}, which is not http or https")
            return super().redirect_request(*args)

    def respond(*args: Any, **settings: Any) -> HTTPResponse:
        response = HTTPResponse(*args, **settings)
        response.fp = io.BufferedReader(_Until(response.fp.detach(), end))
        return response

    def connecting(connection_class: Any) -> Any:
        def connect(*args: Any, **settings: Any) -> Any:
            connection = connection_class(*args, **settings)
            connection.response_class = respond
            return connection

        return connect

    class Http(HTTPHandler):
        def do_open(self, http_class: Any, *args: Any, **settings: Any) -> Any:
            return super().do_open(connecting(http_class), *args, **settings)

    class Https(HTTPSHandler):
        def do_open(self, http_class: Any, *args: Any, **settings: Any) -> Any:
            return super().do_open(connecting(http_class), *args, **settings)

    request = Request(address, headers={"User-Agent": "r1-data"})
    return build_opener(WebOnly, Http, Https).open(request, timeout=seconds)


class _Until(io.RawIOBase):
    def __init__(self, source: Any, end: float) -> None:
        self._source, self._end = source, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        if time.monotonic() > self._end:
            raise TimeoutError("timed out")
        return self._source.readinto(buffer)

    def close(self) -> None:
        self._source.close()
        super().close()
