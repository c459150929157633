"""A tensor-parallel vLLM, whose workers are processes: the same log-probs after each sync, and nobody left behind."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm_cases import (
    PROMPTS,
    TOLERANCE,
    Case,
    adapted,
    assert_exact,
    make_model,
    next_version,
    plain_logprobs,
    sample,
    start,
)

import r1_rollout
from r1_rollout.errors import EngineError, WeightsError
from r1_rollout.types import SamplingParams
from r1_rollout.vllm.compat import running_workers
from r1_rollout.weights import LocalWeights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
FAMILY = "qwen2 tied"
LONG = SamplingParams(max_tokens=60, n=8, temperature=2.0, ignore_eos=True)


def test_a_worker_that_is_killed_in_the_middle_of_a_batch_ends_the_engine_and_leaves_no_memory(tmp_path: Path) -> None:
    cases = start(FAMILY, tmp_path, tensor_parallel_size=2, deadline=120.0)
    case = next(cases)
    workers = running_workers()
    second = max(workers, key=lambda worker: worker.name)
    shared = [name for pid in (os.getpid(), *(worker.pid for worker in workers)) for name in shared_by(pid)]
    assert shared
    assert all(name.endswith(" (deleted)") for name in shared), "what has a name stays when processes are killed"

    def collect() -> None:
        with case.engine.active(LocalWeights(case.model.state_dict().items(), 1)):
            groups = case.engine.generate(PROMPTS, SamplingParams(max_tokens=60, temperature=2.0))
            next(groups)  # a short answer; others are not at their ends
            second.kill()
            list(groups)

    with pytest.raises(EngineError, match="Start the run again"):
        collect()
    with pytest.raises(EngineError, match="Start the run again"), case.engine.active(LocalWeights([], 2)):
        pass
    assert list(cases) == []  # closed
    assert running_workers() == set()


def test_no_worker_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(r1_rollout.__file__).parents[1])!r}]
if __name__ == "__main__":
    from pathlib import Path
    from test_vllm_tensor_parallel import LONG, sample, start, running_workers
    case = next(start({FAMILY!r}, Path({str(tmp_path / "model")!r}), tensor_parallel_size=2))
    sample(case, LONG)
    print("workers", *(worker.pid for worker in running_workers()), flush=True)
    while True:
        sample(case, LONG)
"""
    script = tmp_path / "parent.py"
    script.write_text(code)
    with open(tmp_path / "log", "w") as log:
        parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=log, text=True)
    assert parent.stdout is not None
    said = (line.split() for line in parent.stdout)
    workers = next((words[1:] for words in said if words[:1] == ["workers"]), [])
    parent.kill()
    parent.wait()
    assert len(workers) == 2, (tmp_path / "log").read_text()[-2000:]
    deadline = time.monotonic() + 120.0
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline, "a worker goes on"
        time.sleep(0.1)


def shared_by(pid: int) -> list[str]:
    """What a process has mapped of vLLM's shared memory."""
    return re.findall(r"/dev/shm/(?:psm_|vllm_dist_).*$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)


def is_alive(pid: str) -> bool:
    """Whether there is such a process, and no zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    temporary = tmp_path_factory.mktemp("temporary")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(temporary))
        cases = start(FAMILY, tmp_path_factory.mktemp("model"), tensor_parallel_size=2, lora_rank=8)
        case = next(cases)
        assert torch.get_num_threads() == threads
        assert len(running_workers()) == 2
        yield case
        assert list(temporary.glob("r1-*")) == []  # no weights are left there
        assert list(cases) == []  # closed
    assert running_workers() == set()


def test_logprobs_are_the_learners_after_every_sync_to_two_workers(pair: Case) -> None:
    for seed in (1, 2):
        model = make_model(FAMILY, seed)
        with pair.engine.active(LocalWeights(model.state_dict().items(), next_version(pair.engine))):
            groups = dict(pair.engine.generate(PROMPTS, SamplingParams(max_tokens=8, n=2, temperature=0.7)))
            scores = pair.engine.logprobs_of(PROMPTS, [[3, 60, 5]] * len(PROMPTS), 0.7)
        assert_exact(model, [groups[index] for index in range(len(PROMPTS))], 0.7)
        for prompt, own in zip(PROMPTS, scores, strict=True):
            expected = plain_logprobs(model, prompt, [3, 60, 5], 0.7)
            torch.testing.assert_close(torch.tensor(own), expected, atol=TOLERANCE, rtol=0)


def test_two_workers_take_adapters(pair: Case) -> None:
    sample(pair, SamplingParams(max_tokens=2))
    model, adapter = adapted(pair.model, 1)
    with pair.engine.active(LocalWeights(adapter, next_version(pair.engine))):
        groups = dict(pair.engine.generate(PROMPTS, SamplingParams(max_tokens=8, n=2)))
    assert_exact(model, [groups[index] for index in range(len(PROMPTS))], 1.0)


def test_both_workers_refuse_weights_of_another_model_and_take_the_next(
    pair: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [("model.layers.0.nonsense.weight", torch.zeros(3, 3))]
    monkeypatch.setattr(pair.engine, "_shapes", {})  # as before the first sync, when only the workers can tell
    for _ in range(2):
        with (
            pytest.raises(WeightsError, match=r"worker 0: .*nonsense"),
            pair.engine.active(LocalWeights(wrong, next_version(pair.engine))),
        ):
            pass
    assert_exact(pair.model, sample(pair, SamplingParams(max_tokens=8)), 1.0)
