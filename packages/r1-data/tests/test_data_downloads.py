"""Tests of what servers may answer: each is named by row and address, and none ends a check or a run."""

import contextlib
import socket
import threading
import time

import pytest

from r1_data.references import Downloads, Url, fetch
from r1_data.types import MediaError

OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "garbage": (b"\x00\x01\x02 nonsense\r\n\r\n", "not fetched"),
    "nothing": (b"", "not fetched"),
    "chunked-cut": (OK + b"Transfer-Encoding: chunked\r\n\r\nff\r\nabc", "not fetched"),
    "many-headers": (OK + b"".join(b"X-%d: 1\r\n" % n for n in range(120)) + b"\r\n", "not fetched"),
    "long-header": (OK + b"X: " + b"a" * 70_000 + b"\r\n\r\n", "not fetched"),
    "cut": (OK + b"Content-Length: 100\r\n\r\nabc", "cut off after 3 of 100|not fetched"),
    "bad-length": (OK + b"Content-Length: -5\r\nConnection: close\r\n\r\n", None),
    "to-a-file": (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "not http or https|not fetched"),
    "missing": (b"HTTP/1.1 404 Not Found\r\n\r\n", "404"),
}


@pytest.fixture(scope="module")
def server():
    """Answers `/name` with its bytes; `/drip` with a byte and `/headers` with a header every fifth of a second."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            name = connection.recv(4096).split(b" ")[1].decode().lstrip("/")
            if name in ("drip", "headers"):
                connection.sendall(OK + (b"Content-Length: 1000\r\n\r\n" if name == "drip" else b""))
                for _ in range(600):  # until the client hangs up
                    connection.sendall(b"a" if name == "drip" else b"X: 1\r\n")
                    time.sleep(0.2)
            else:
                connection.sendall(ANSWERS[name][0])

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.close()


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_no_picture_is_a_media_error_that_names_the_address(server, name):
    message = ANSWERS[name][1]
    with pytest.raises(MediaError, match=message) if message else contextlib.nullcontext() as caught:
        fetch(Url(f"{server}/{name}", Downloads(timeout=60.0)))
    assert caught is None or f"{server}/{name}" in str(caught.value)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1/a b.png", "http://[::1", "http://", "http://127.0.0.1:99999/x"]
)
def test_an_address_that_is_none_is_a_media_error(address):
    with pytest.raises(MediaError, match="not fetched"):
        fetch(Url(address, Downloads(timeout=60.0)))


@pytest.mark.parametrize(
    ("name", "message"), [("drip", r"over .* bytes or 0.5 seconds|timed out"), ("headers", "timed out")]
)
def test_an_answer_that_drips_is_given_up_at_its_limit(server, name, message):
    with pytest.raises(MediaError, match=f"/{name}: .*({message})"):
        fetch(Url(f"{server}/{name}", Downloads(timeout=0.5)))
