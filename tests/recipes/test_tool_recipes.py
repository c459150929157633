"""The recipes with tools: Search-R1 with a retrieval server that speaks its protocol, and DeepEyes with its reward."""

import json
import re
import runpy
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from endtoend import R1, read_log
from PIL import Image
from recipes.pages import EXAMPLES, QUICKSTART, RECIPES, stood_in
from recipes.test_recipes import follow, runs

PASSAGES = (
    "Pluto\nA dwarf planet.",
    "Mars\nThe fourth planet.",
    "Venus\nThe second planet.",
    "Earth\nThe third planet.",
)
SEARCH_URL = "worker.rollout.multi_turn.tool_kwargs.search.url"

Answer = Callable[[dict[str, Any]], object]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Starts a server on loopback that answers JSON with JSON; its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                content = json.dumps(answer(body)).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()


class Retriever:
    """Ranks four passages by the words that they share with a query, and answers as Search-R1's server does."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, body: dict[str, Any]) -> object:
        self.asked.append(body)
        return {"result": [self.rank(query, body["topk"]) for query in body["queries"]]}

    def rank(self, query: str, topk: int) -> list[dict[str, Any]]:
        words = {*re.findall(r"\w+", query.lower())}
        found = sorted(((len(words & {*re.findall(r"\w+", one.lower())}), one) for one in PASSAGES), reverse=True)
        return [{"document": {"id": text[:3], "contents": text}, "score": float(score)} for score, text in found[:topk]]


def test_a_check_searches_as_the_retrieval_server_of_search_r1_expects(
    r1: R1,
    desk: Path,
    serve: Callable[[Answer], str],
) -> None:
    retriever = Retriever()
    words = ["r1", "check", "examples/search_r1/config.yaml", f"{SEARCH_URL}={serve(retriever)}/retrieve"]
    said = r1(*stood_in(words, RECIPES["search_r1"], QUICKSTART)[1:]).output
    assert retriever.asked
    assert all(body.keys() == {"queries", "topk", "return_scores"} and body["topk"] == 3 for body in retriever.asked)
    assert "the tool search fails" not in said


def test_the_page_of_search_r1_runs(r1: R1, desk: Path, serve: Callable[[Answer], str]) -> None:
    url = f"{SEARCH_URL}={serve(Retriever())}/retrieve"

    def change(words: list[str]) -> list[str]:
        return [*words, url] if words[:2] in (["r1", "train"], ["r1", "check"]) else words

    follow(EXAMPLES / "search_r1/README.md", r1, QUICKSTART, desk, change)
    assert runs(desk).keys() == {"qwen2_5_3b"}


def test_the_page_of_deepeyes_runs(r1: R1, desk: Path) -> None:
    def change(words: list[str]) -> list[str]:
        return ["none"] if words[0] == "vllm" else [word for word in words if "judge_url" not in word]

    follow(EXAMPLES / "deepeyes/README.md", r1, QUICKSTART, desk, change)
    (folder,) = runs(desk).values()
    assert {"reward/accuracy", "reward/zoomed"} <= read_log(folder)[0].keys()


@pytest.mark.quick
def test_deepeyes_rewards_a_right_answer_more_after_a_zoom(serve: Callable[[Answer], str]) -> None:
    reward = runpy.run_path(str(EXAMPLES / "deepeyes/reward.py"))["compute_score"]
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which color?"}]}
    call = {"role": "assistant", "content": "<tool_call>…</tool_call>"}
    zoom = {"role": "tool", "content": [{"type": "image"}]}
    failed = {"role": "tool", "content": "error: ValueError"}

    def score(response: str, *later: dict[str, Any], **settings: str) -> float:
        item = {"response": response, "ground_truth": "red", "messages": [question, *later]}
        (found,) = reward([item], **settings)
        return round(found["overall"], 6)

    assert score("<think>a</think><answer>Red.</answer>") == 0.8
    assert score("<answer>red</answer>", call, zoom) == 2.0
    assert score("<answer>red</answer>", call, failed) == 0.8
    assert score("<answer>blue</answer>", call, zoom) == 0.0
    assert score("<think>a<answer>red</answer>", call, zoom) == 1.8
    assert score(f"<answer>red{' ' * 5}{'!' * 1000}</answer>") == -0.2

    def judge(body: dict[str, Any]) -> object:
        text = json.dumps(body["messages"])
        mark = f"VERDICT-{re.search(r'VERDICT-([0-9a-f]+)', text)[1]}: {10 if 'crimson' in text else 0}"
        return {"choices": [{"message": {"role": "assistant", "content": mark}, "finish_reason": "stop"}]}

    judged = {"judge_url": f"{serve(judge)}/v1", "judge_model": "judge"}
    assert score("<answer>crimson</answer>", call, zoom, **judged) == 2.0
    assert score("<answer>green</answer>", call, zoom, **judged) == 0.0


@pytest.mark.quick
def test_deepeyes_zooms_in_pixels() -> None:
    zoom = runpy.run_path(str(EXAMPLES / "deepeyes/zoom.py"))["image_zoom_in_tool"]
    picture = Image.new("RGB", (200, 100), "white")
    picture.paste("red", (100, 50, 200, 100))
    part = zoom([100, 50, 400, 100], images=[picture])
    assert part.size == (100, 50)
    assert part.getcolors() == [(5000, (255, 0, 0))]
    for bbox in ([0, 0, 20, 90], [50, 50, 40, 90], [0, 0, 100]):
        with pytest.raises(ValueError, match="bbox_2d must"):
            zoom(bbox, images=[picture])
