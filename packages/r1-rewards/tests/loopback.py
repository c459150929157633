"""Servers on loopback for the tests: one that runs a function, one that runs an application, one that is broken."""

import contextlib
import functools
import http.client
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("500", "reset", "slow", "bad_json", "truncated", "too_few", "too_many")


@contextlib.contextmanager
def answering(respond, port=0):
    """Serve `respond(body, path, headers)`, which returns a status, an answer of JSON, bytes or None (hang up), and
    perhaps headers; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            status, answer, *headers = respond(body, self.path, self.headers)
            self.reply(status, answer if isinstance(answer, bytes | None) else json.dumps(answer).encode(), *headers)

        def reply(self, status, answer, headers=()):
            if answer is None:
                reset = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                self.close_connection = True
                return
            cut = status == "truncated"
            self.send_response(200 if cut else status)
            self.send_header("content-length", str(len(answer) + 100 * cut))
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(answer)
            self.close_connection = cut

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_):
            pass  # clients that hang up are part of these tests

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def faulty(backend, *, share, slow, seed):
    """Serve what `backend` (a URL) answers, spoilt for a `share` of the requests; yield the URL and a fault counter."""
    draw, lock, seen = random.Random(seed), threading.Lock(), Counter()

    def respond(body, path, headers):
        with lock:
            fault = draw.choice(FAULTS) if draw.random() < share else "none"
            seen[fault] += 1
        if fault in ("500", "reset"):
            return (500, b"{}") if fault == "500" else (0, None)
        if fault == "slow":
            time.sleep(slow)
        answer = forward(backend, path, body)
        if fault == "bad_json":
            return 200, answer[: len(answer) // 2]
        if fault == "truncated":
            return "truncated", answer
        if fault in ("too_few", "too_many"):
            [(key, values)] = json.loads(answer).items()
            return 200, {key: values[:-1] if fault == "too_few" else values * 2}
        return 200, answer

    with answering(respond) as url:
        yield url, seen


def forward(backend, path, body):
    connection = http.client.HTTPConnection(urlsplit(backend).netloc, timeout=30)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse().read()
    connection.close()
    return answer


@contextlib.contextmanager
def serving(app, **settings):
    """Serve an ASGI application with uvicorn in a thread; yield the URL."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", **settings))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@functools.cache
def _taken():
    """A socket that does not listen, and keeps others from listening at its port."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken


def dead_url():
    """Return a URL on which nothing listens as long as this process lives."""
    return f"http://127.0.0.1:{_taken().getsockname()[1]}"
