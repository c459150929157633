"""A small HTTP server that stands for the Hugging Face hub's endpoint: it takes a repository's creation and commits."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_a_secret_of_the_tests"


class Hub:
    """Repositories by name, each with its files, and what was asked."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}  # large files by SHA-256
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.address = ""

    def answer(self, method: str, path: str, body: bytes, token: str | None) -> tuple[int, Any, dict[str, str]]:
        """Return status, JSON or bytes, and headers."""
        self.asked.append(f"{method} {path}")
        self.tokens.add(token)
        if path.startswith("/objects/"):
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":  # of a card
            return 200, {"errors": [], "warnings": []}, {}
        name = next((name for name in self.files if f"/{name}" in path), None)
        if name is None:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if "/resolve/" in path:
            return self._resolve(name, path.partition("/resolve/main/")[2])
        if "/preupload/" in path:
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False} for one in json.loads(body)["files"]
            ]  # fmt: skip
            return 200, {"files": modes}, {}
        if path.endswith("/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._upload(one) for one in json.loads(body)["objects"]]}, {}
        if "/commit/" in path:
            return self._commit(name, [json.loads(line) for line in body.splitlines()])
        return 200, {"id": name, "private": self.private[name], "sha": "0" * 40, "siblings": []}, {}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"me/{asked['name']}"
        if name.startswith("others/"):
            return 403, {"error": "You don't have the rights to create a model under the namespace others"}, {}
        if name in self.files:
            return 409, {"error": "You already created this model repo", "url": f"{self.address}/{name}"}, {}
        self.files[name] = {}
        self.private[name] = bool(asked.get("private") or asked.get("visibility") == "private")
        return 200, {"url": f"{self.address}/{name}", "name": name}, {}

    def _resolve(self, name: str, file: str) -> tuple[int, Any, dict[str, str]]:
        content = self.files[name].get(file)
        if content is None:
            return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
        return 200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": "0" * 40}

    def _upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.address}/objects/{asked['oid']}", "header": {}}
        return {**asked, "actions": {"upload": upload}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any, dict[str, str]]:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[name][value["path"]] = self.objects[value["oid"]]
        return 200, {"commitUrl": f"{self.address}/{name}/commit/0", "commitOid": "0" * 40, "success": True}, {}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            status, found, headers = hub.answer(self.command, path, body, self.headers.get("Authorization"))
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = _answer

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
