"""A trained model behind a real `vllm serve`: queried as on the page, and by RLPR instead of the policy."""

import base64
import io
import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from endtoend import R1, SMALL, read_log
from recipes.pages import EXAMPLES, commands_of
from vllm_server import serving

from r1_cli.build.rewards.frozen_model import FrozenReading
from r1_cli.build.rewards.served_model import ServedReading
from r1_core.learner.batching import Batching, MicroLimit
from r1_data.types import Prompt

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")]
PAGE = EXAMPLES / "README.md"
GAP = 1e-4  # float32, as between engines and the learner


@pytest.fixture(scope="module")
def desk(r1: R1, quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `my-model` lies, merged from a run's checkpoint."""
    folder = tmp_path_factory.mktemp("desk")
    r1("merge", quickstart / "global_step_3", "--output", folder / "my-model")
    return folder


@pytest.fixture(scope="module")
def server(desk: Path) -> Iterator[str]:
    """The address of the page's `vllm serve`, with what RLPR's page says of pictures, and what makes it small."""
    (words,) = [words for words in commands_of(PAGE) if words[0] == "vllm"]
    with serving(words, desk, "--enable-scale-out") as address:
        yield address


def test_the_page_asks_a_real_server_about_text_and_a_picture(server: str) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), "white").save(buffer, format="PNG")
    picture = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    questions = [words for words in commands_of(PAGE) if words[0] == "curl"]
    assert len(questions) == 2
    for words in questions:
        words = [word.replace("http://127.0.0.1:8000", server).replace("2048", "12") for word in words]
        words = [word.replace("https://example.com/triangle.png", picture) for word in words]
        said = subprocess.run(
            [*words, "--silent", "--fail-with-body", "--noproxy", "*"], capture_output=True, text=True
        )
        assert said.returncode == 0, said.stdout + said.stderr
        answer = json.loads(said.stdout)
        assert answer["model"] == "my-model"
        assert answer["choices"][0]["message"]["content"]


def test_rlpr_asks_a_real_server_and_is_told_what_the_learner_says(
    server: str, desk: Path, r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    ask = ServedReading.read_logprobs

    def noting(reading: ServedReading, *given: Any) -> list[list[float]]:
        found = ask(reading, *given)
        asked.append((*given, found))
        return found

    monkeypatch.setattr(ServedReading, "read_logprobs", noting)
    words = [word for word in SMALL if not word.startswith(("data.val_files", "data.train_files"))]
    words += [
        "data.train_files=examples/quickstart/train.parquet[:16]", "data.val_sources=null", "trainer.val_freq=-1",
        "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.max_steps=2",
        f"worker.actor.model.model_path={desk / 'my-model'}", f"trainer.save_checkpoint_path={tmp_path}",
    ]  # fmt: skip
    r1("train", "examples/rlpr/vision.yaml", *words, f"worker.reward.reward_function_kwargs.model={server}/v1")
    for record in read_log(tmp_path):
        assert record["reward/unscored"] == record["reward/failures"] == 0
        assert 0 < record["reward/score_a"] < 1
        assert 0 < record["reward/score_b"] < 1
    assert sum(len(prompts) for prompts, *_ in asked) == 16 + 2 * 4 * 4
    assert all(prompt.model_inputs for prompts, *_ in asked for prompt in prompts)
    own = learners(desk / "my-model")
    for prompts, responses, starts, temperature, found in asked:
        assert_near(found, own.read_logprobs(prompts, responses, starts, temperature))
    text = Prompt(
        id="rows:1", text="", token_ids=[5, 6, 7], engine_token_ids=[5, 6, 7], ground_truth="",
        position_ids=torch.arange(3).expand(4, -1), metadata={},
    )  # fmt: skip
    alone = [text, text], [[8, 9, 10, 11], [12, 13]], [1, 0]
    assert_near(ServedReading(server).read_logprobs(*alone), own.read_logprobs(*alone))


def learners(folder: Path) -> FrozenReading:
    """The model as the learner computes with it."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return FrozenReading(model, Batching(False, experience=MicroLimit(8)), torch.device("cpu"))


def assert_near(found: list[list[float]], expected: list[list[float]]) -> None:
    assert [pytest.approx(row, abs=GAP) for row in expected] == found
