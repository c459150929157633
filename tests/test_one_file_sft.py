"""`examples/one_file_sft.py` fine-tunes on the parts of `r1_cli.open`, and learns."""

import importlib.util
import json

import pytest
from endtoend import QUICKSTART, ROOT

import r1_cli
from r1_cli.config import load_config

FILE = ROOT / "examples/one_file_sft.py"


def test_it_has_at_most_sixty_lines() -> None:
    assert len(FILE.read_text().splitlines()) <= 60


@pytest.mark.slow
def test_it_learns_from_its_own_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("one_file_sft", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config, _ = load_config([f"config={QUICKSTART}", "data.rollout_batch_size=8", "worker.actor.global_batch_size=8"])
    with r1_cli.open(config) as parts:
        before = module.accuracy(parts)
        nll = [metrics["nll"] for metrics in module.train(parts, 10)]
        assert module.accuracy(parts) > before + 0.1, json.dumps(nll)
