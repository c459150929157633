"""Real vLLM on processors takes the weights that ranks send past the driver, over TCP in the place of NCCL."""

from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_engines import OneHost
from cli_ranks import OneRank
from transformers import Qwen2Config, Qwen2ForCausalLM

from r1_cli.cluster.direct import DirectBackend
from r1_cli.cluster.engine import EngineHost
from r1_cli.cluster.engines import RemoteEnginePool
from r1_cli.cluster.rank import Rank
from r1_cli.cluster.rank_client import RankClient, RankedPolicy
from r1_core.learner import Learner
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel
from r1_core.objective import Objective
from r1_rollout.probes import ProbePrompt
from r1_rollout.transports import direct
from r1_rollout.vllm.engine import VllmEngine
from r1_rollout.vllm.options import EngineOptions
from r1_rollout.weight_checks import expected_checksums

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")]

TOLERANCE = 1e-4
SIZES = {  # heads of 32: vLLM's attention on processors has no smaller ones
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PROMPTS = [ProbePrompt(f"p{n}", list(range(1, n + 1)), torch.arange(n)[None]) for n in (4, 1, 17, 9, 40)]
RESPONSES = [[3, 9, 2], [11], [5, 5, 7], [1, 2], [8, 30]]


def start(folder: Path, stack: ExitStack) -> VllmEngine:
    options = EngineOptions(
        end_token_ids=frozenset({7}), dummy_weights=True, transfer="r1_tcp", dtype="float32",
        kv_cache_bytes=1 << 26, max_model_len=128,
    )  # fmt: skip
    engine = VllmEngine.start(str(folder), options)
    stack.callback(engine.close)
    return engine


def make_model() -> Any:
    """Random weights, scaled up so that the model has opinions."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def build(model: Any, parallel: Parallel) -> tuple[Learner, Objective]:
    return Learner(model, build_optimizer(model.named_parameters(), lr=1e-2), lambda step: 1.0), Objective()


@torch.no_grad()
def logprobs_of(model: Any) -> list[list[float]]:
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        tokens = torch.tensor([[*prompt.token_ids, *response]])
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        found.append(logprobs[-len(response) :].tolist())
    return found


def test_vllm_samples_from_what_ranks_have_sent_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BUCKET", 40_000)
    model = make_model()
    model.save_pretrained(tmp_path)
    rank = Rank(partial(build, model))
    rank.join()
    learner, host = RankedPolicy(RankClient(OneRank(rank))), EngineHost(partial(start, tmp_path))
    engines = RemoteEnginePool(
        [("engine-0", OneHost(host))], max_sequences=8, dtype=None, direct=DirectBackend("r1_tcp", 1)
    )
    try:
        for version in (1, 2):
            source = learner.source(version)
            with engines.active(source):
                found = engines.logprobs_of(PROMPTS, RESPONSES)
                torch.testing.assert_close(found, logprobs_of(model), atol=TOLERANCE, rtol=0)
                compared = engines.compare(source.run_with_weights(partial(expected_checksums, precisions=["float32"])))
                assert not compared.differing
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
    finally:
        host.close()
