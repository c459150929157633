"""A model of transformers behind HTTP, answering as `vllm serve --enable-scale-out` does, in a process of its own.

`teacher_server.py MODEL [--max-pixels N] [--slow SECONDS] [--dies-after ANSWERS] [--most-logprobs K]`
prints its address. Pictures are resized and expanded by the model's own processor.
"""

import argparse
import base64
import io
import itertools
import json
import math
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


class Model:
    def __init__(self, path: str, max_pixels: int | None, most_logprobs: int) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(path)
        sizes = {"min_pixels": 3136, "max_pixels": max_pixels or 50176}
        self.pictures = AutoProcessor.from_pretrained(path, **sizes).image_processor
        self.most_logprobs, self._lock = most_logprobs, threading.Lock()

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.processor.tokenizer.encode(body["prompt"], add_special_tokens=False)}

    def read(self, token_ids: list[int], parts: list[dict[str, Any]], count: int) -> list[Any]:
        """Return vLLM's `prompt_logprobs`: of each token its log-prob and those of the `count` most likely ones."""
        inputs: dict[str, Any] = {}
        if parts:
            images = [Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2]))) for part in parts]
            inputs = dict(self.pictures(images=images, return_tensors="pt"))
            sizes = (inputs["image_grid_thw"].prod(-1) // self.pictures.merge_size**2).tolist()
            placeholder, given = self.model.config.image_token_id, iter(sizes)
            expanded = [[token] * next(given) if token == placeholder else [token] for token in token_ids]
            token_ids = [token for tokens in expanded for token in tokens]
            kinds = torch.tensor([[int(token == placeholder) for token in token_ids]])
            inputs["mm_token_type_ids"] = kinds
        with torch.no_grad(), self._lock:
            logits = self.model(input_ids=torch.tensor([token_ids]), **inputs, use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1)
        top, ids = logprobs.topk(max(count, 1))
        found: list[Any] = [None]
        for place, token in enumerate(token_ids[1:]):
            listed = {str(i): float(v) for i, v in zip(ids[place].tolist(), top[place].tolist(), strict=True)}
            listed = dict([*listed.items()][:count]) | {str(token): float(logprobs[place, token])}
            found.append({key: {"logprob": max(value, -9999.0)} for key, value in listed.items()})
        return found


def serve(model: Model, slow: float, dies_after: float) -> None:
    answered = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}")
            if self.path == "/tokenize":
                self.reply(200, model.tokenize(body))
                return
            time.sleep(slow)
            if next(answered) >= dies_after:
                os._exit(1)
            scale_out = self.path == "/inference/v1/generate"
            count = (body["sampling_params"] if scale_out else body)["prompt_logprobs"]
            if count > model.most_logprobs:
                self.reply(400, {"error": f"Requested prompt logprobs of {count} is greater than max allowed"})
                return
            listed = model.read(body["token_ids" if scale_out else "prompt"], body.get("content_parts", []), count)
            self.reply(200, {"choices": [{"text": "", "prompt_logprobs": listed}]})

        def reply(self, status: int, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--max-pixels", type=int)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--dies-after", type=float, default=math.inf)
    parser.add_argument("--most-logprobs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    serve(Model(options.model, options.max_pixels, options.most_logprobs), options.slow, options.dies_after)
