"""A server that speaks vLLM's protocol, answers as a function of the seed, and fails on demand. As a script: over a
Unix socket, `python fake_vllm.py SOCKET`."""

import json
import os
import random
import socket
import socketserver
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

END = 2
Fault = Callable[[int, dict[str, Any]], str | None]


def answer(seed: int, index: int, max_tokens: int) -> tuple[list[int], list[float], str]:
    """What every fake server answers: tokens, log-probs, and why it ends."""
    draw = random.Random(seed + index)
    length = draw.randint(1, max_tokens)
    tokens = [draw.randint(3, 59) for _ in range(length)]
    if length < max_tokens:
        tokens[-1] = END
    return tokens, [-draw.randrange(1, 4096) / 4096 for _ in tokens], "stop" if length < max_tokens else "length"


class FakeServer:
    """The state of one server, and its faults. `fault(number of the request, its body)` names one, or None."""

    def __init__(self, fault: Fault = lambda number, body: None, token: str | None = None) -> None:
        self.fault = fault
        self.max_model_len = 4096
        self.token = token
        self.base: str | None = None
        self.label: str | None = None
        self.engine_label = "default"
        self.adapters: list[str] = []
        self.binds = True  # adapters find their modules
        self.has_tokenizer = True
        self.loads: list[str] = []
        self.keeps_old_weights = False
        self.rejects_weights = False
        self.backend: str | None = "r1_tcp"  # of its weight transfer
        self.update_fault: Callable[[int], str | None] = lambda number: None  # of the bucket with this number
        self.calls: list[str] = []  # of a push by broadcast
        self.received: dict[str, Any] = {}
        self.group: Any = None
        self.updates = 0
        self.down = False
        self.requests: list[dict[str, Any]] = []
        self.served: Counter[str] = Counter()  # label of the weights at each request
        self.broken_off = threading.Event()
        self.gate = threading.Event()  # generation waits for it
        self.gate.set()
        self.ending = threading.Event()
        self.lock = threading.Lock()
        self.shift = 0.0  # of every score
        self.cached: int | None = None  # tokens of each prompt, as it reports them

    def control(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/weight_info":
            return {"weight_version": self.engine_label}
        if path == "/update_weight_version":
            self.engine_label = body["new_version"]
            return {"success": True}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/collective_rpc" and body["method"] == "r1_holds":
            return {"results": [{"base": self.base, "version": self.label}]}
        if path == "/collective_rpc" and body["method"] == "r1_limits":
            return {"results": [{"vocabulary": 64, "max_model_len": self.max_model_len}]}
        if path == "/v1/models":
            cards = [{"id": name, "parent": "model"} for name in self.adapters]
            return {"data": [{"id": "model", "parent": None}, *cards]}
        if path == "/v1/unload_lora_adapter":
            self.adapters.remove(body["lora_name"])
        if path == "/v1/load_lora_adapter":
            assert os.listdir(body["lora_path"])
            self.adapters.append(body["lora_name"])
        if path == "/collective_rpc" and body["method"] == "r1_adopt":
            return {"results": [self.adopt(**body["kwargs"])]}
        if path == "/collective_rpc" and body["method"] == "r1_load":
            from r1_rollout.transports.folder import read_shards

            kwargs = body["kwargs"]
            if self.rejects_weights:
                raise FileNotFoundError("there is no module named w0")
            tensors = sum(1 for _ in read_shards(kwargs["folder"]))
            self.loads.append(kwargs["version"])
            if not self.keeps_old_weights:
                self.base = self.label = kwargs["version"]
            return {"results": [{"version": kwargs["version"], "tensors": tensors}]}
        return self.broadcast(path, body)

    def broadcast(self, path: str, body: dict[str, Any]) -> Any:
        """Take weights over vLLM's weight transfer."""
        from r1_rollout.transports.groups import TcpReceiver

        method = body.get("method")
        self.calls.append(method or path)
        if method == "r1_begin":
            self.base, self.label, self.received = None, None, {}
            return {"results": [{"backend": self.backend}]}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            self.group = TcpReceiver(**body["init_info"])
        if path == "/update_weights":
            self.update(**body["update_info"])
        if method == "r1_commit":
            self.group.destroy()
            self.loads.append(body["kwargs"]["version"])
            if not self.keeps_old_weights:
                self.base = self.label = body["kwargs"]["version"]
            return {"results": [{"version": body["kwargs"]["version"]}]}
        return None

    def update(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        """Receive a bucket."""
        import torch

        number, self.updates = self.updates, self.updates + 1
        fault = self.update_fault(number)
        if fault == "exit":
            os._exit(9)
        if fault == "hang":
            self.ending.wait(120)
        if fault == "reject":
            raise FileNotFoundError("there is no module named w0")
        for name, kind, shape in zip(names, dtype_names, shapes, strict=True):
            self.received[name] = torch.empty(shape, dtype=getattr(torch, kind))
            self.group.receive(self.received[name])

    def adopt(self, folder: str, version: str) -> dict[str, Any]:
        from r1_rollout.transports.adapter import written_names

        if not self.binds:
            return {"error": "the adapter would be bound to nothing: vLLM's model has no layers.7.q_proj"}
        self.loads.append(version)
        self.label = version
        return {"version": version, "tensors": len(written_names(folder))}

    def forget(self) -> None:
        """Be as a server that somebody has started anew."""
        self.base, self.label, self.engine_label, self.adapters = None, None, "default", []


def events(body: dict[str, Any], label: str | None, fault: str | None, cached: int | None = None) -> Iterator[bytes]:
    params = body["sampling_params"]
    first: dict[str, Any] = {
        "prompt_token_ids": body["token_ids"][::-1] if fault == "other_prompt" else body["token_ids"]
    }
    for index in range(params["n"] - (fault == "sample_missing")):
        tokens, logprobs, reason = answer(params["seed"], index, params["max_tokens"])
        if fault == "nan":
            logprobs[-1] = -9999.0
        content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
        if fault == "wrong_ids":
            content[0]["token_id"] += 1
        if fault == "short":
            content.pop()
        if fault == "goes_on":
            reason = "stop" if reason == "length" else "length"
        versions = [{"version": "old" if fault == "stale" else label, "start": 0, "end": len(tokens)}]
        choice = {"index": index, "token_ids": tokens, "logprobs": {"content": content}}
        choice |= {"finish_reason": "abort" if fault == "abort" else reason, "weight_versions": versions}
        if fault == "field_missing":
            del choice["token_ids"]
        yield b"data: " + json.dumps(first | {"choices": [choice]}).encode() + b"\n\n"
        if fault == "doubled":
            yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        if fault == "bad_json":
            yield b"data: {oops\n\n"
        if fault == "late_refusal":
            yield b'data: {"error": {"message": "longer than max_model_len", "code": 400}}\n\n'
        if fault == "error_event":
            yield b'data: {"error": {"message": "out of luck"}}\n\n'
        first = {}
    if body["stream_options"]["include_usage"]:
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        usage = {"prompt_tokens": len(body["token_ids"]), **details}
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    if fault != "ends_early":
        yield b"data: [DONE]\n\n"


class Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def address_string(self) -> str:
        return "local"

    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"))

    def reply(self, body: dict[str, Any]) -> None:
        fake = self.fake
        if fake.token and self.headers.get("Authorization") != f"Bearer {fake.token}":
            self.send(401, b"no")
        elif fake.down:
            self.send(503, b"down")
        elif self.path == "/detokenize" and not fake.has_tokenizer:
            self.send(400, b"there is none")
        elif self.path == "/inference/v1/generate":
            self.generate(body)
        else:
            try:
                self.send(200, json.dumps(fake.control(self.path, body)).encode())
            except OSError as error:
                self.send(500, str(error).encode())

    def generate(self, body: dict[str, Any]) -> None:
        fake = self.fake
        with fake.lock:
            number = len(fake.requests)
            fake.requests.append(body)
            fake.served[str(fake.label)] += 1
        fault = fake.fault(number, body)
        if "model" in body and body["model"] not in fake.adapters:
            return self.send(404, b"the model does not exist")
        if fault == "refused":
            return self.send(400, b"the prompt is longer than max_model_len")
        if fault == "cache_miss" and any("url" not in part for part in body.get("content_parts", ())):
            return self.send(400, b"Cache miss for image at index 0 but data is not provided.")
        if fault == "500":
            return self.send(500, b"internal error")
        if fault == "reset":
            return None
        if fault == "exit":
            os._exit(9)
        if scored := (body["sampling_params"].get("extra_args") or {}).get("r1_forced_token_ids"):
            content = [{"token_id": t, "logprob": -t / 100 + fake.shift} for t in scored]
            versions = [{"version": fake.label, "start": 0, "end": len(scored)}]
            choice = {"index": 0, "token_ids": scored, "logprobs": {"content": content}, "finish_reason": "length"}
            return self.send(200, json.dumps({"choices": [choice | {"weight_versions": versions}]}).encode())
        self.send(200, None)
        if fault == "hang":
            fake.ending.wait(120)
            return None
        while not fake.gate.wait(0.05):
            if not self.still_there():
                fake.broken_off.set()
                return None
        for event in events(body, fake.label, fault, fake.cached):
            self.wfile.write(event)
        return None

    def still_there(self) -> bool:
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        finally:
            self.connection.setblocking(True)

    def send(self, status: int, text: bytes | None) -> None:
        self.send_response(status)
        self.end_headers()
        if text:
            self.wfile.write(text)


class _Quiet(socketserver.ThreadingMixIn):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Tcp(_Quiet, socketserver.TCPServer):
    pass


class _Unix(_Quiet, socketserver.UnixStreamServer):
    pass


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """Serve in threads on a free port of the loopback; yield the address."""
    with _Tcp(("127.0.0.1", 0), type("H", (Handler,), {"fake": fake})) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            fake.ending.set()
            fake.gate.set()
            server.shutdown()


def main(path: str) -> None:
    if os.environ.get("FAKE_START") == "broken":
        print("the model has a shape that nobody knows", flush=True)
        sys.exit(3)
    dies_at = int(os.environ.get("FAKE_DIES_AT", "-1"))
    fake = FakeServer(lambda number, body: "exit" if number == dies_at else None, os.environ["VLLM_API_KEY"])
    update_dies_at, fault = (
        int(os.environ.get("FAKE_UPDATE_DIES_AT", "-1")),
        os.environ.get("FAKE_UPDATE_FAULT", "exit"),
    )
    fake.update_fault = lambda number: fault if number == update_dies_at else None
    _Unix(path, type("H", (Handler,), {"fake": fake})).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
