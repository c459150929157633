"""A real vLLM server as teacher: its likely tokens give the loss and the advantages that transformers' model gives."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log
from test_distillation import FORMS, MODEL, STEPS, noisy_copy, rows_of
from torch import Tensor
from vllm_server import serving

from r1_cli.build.rendering import build_renderer
from r1_cli.build.rewards.served_model import ServedReading
from r1_cli.build.teacher import open_servers, require_length_of_servers
from r1_cli.config import load_config
from r1_cli.config.distillation import OneTeacherConfig
from r1_cli.models.files import ModelFiles, open_model
from r1_cli.models.load import ModelError
from r1_cli.train.groups.group import to_sample
from r1_cli.train.teaching import with_top
from r1_core.advantages.distillation import Distillation
from r1_core.learner import Learner
from r1_core.objective import Objective
from r1_core.types import Sample
from r1_data.messages import RowReader
from r1_data.sources import read_sources
from r1_data.types import Prompt

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")]
LISTED, LENGTH = 8, 512  # likely tokens, and tokens of a text, at most
GAP = 1e-4  # nats, float32: of a log-prob and of the loss; relative of a gradient


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_copy(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def server(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    words = ["vllm", "serve", str(teacher), "--port", "8000", f"--max-logprobs={LISTED}", "--enable-scale-out"]
    with serving(words, tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture(scope="module")
def policy() -> ModelFiles:
    return open_model(load_config([f"config={ROOT / QUICKSTART}"])[0])


@pytest.fixture(scope="module")
def asked(policy: ModelFiles) -> tuple[list[Prompt], list[list[int]]]:
    """Two prompts with pictures and one without, and an answer to each."""
    config = load_config([f"config={ROOT / QUICKSTART}"])[0]
    renderer, reader = build_renderer(config, policy), RowReader()
    (rows,) = read_sources([[f"{ROOT}/examples/quickstart/train.parquet"]])
    examples = [replace(reader(*rows[place]), id=f"row {place}") for place in (0, 3)]
    plain = replace(examples[0], messages=[{"role": "user", "content": "How many?"}], media=())
    prompts = [renderer.render(example) for example in (*examples, plain)]
    spread = torch.Generator().manual_seed(0)
    return prompts, [torch.randint(5, 250, (length,), generator=spread).tolist() for length in (9, 1, 6)]


def logprobs(path: Path, samples: list[Sample]) -> tuple[torch.nn.Module, list[Tensor]]:
    """transformers' own model in float64, and its log-probs [n, V] in place of each sample's own tokens."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    found = []
    for one in samples:
        kinds = (one.token_ids == model.config.image_token_id).int()[None]
        inputs = {**one.model_inputs, "mm_token_type_ids": kinds} if one.model_inputs else {}
        logits = model(input_ids=one.token_ids[None], **inputs, use_cache=False).logits[0]
        found.append(logits.log_softmax(-1)[:-1][one.loss_mask[1:]])
    return model, found


def test_its_likely_tokens_give_the_loss_and_the_gradient_of_the_local_model(
    server: str, teacher: Path, asked: tuple[list[Prompt], list[list[int]]]
) -> None:
    prompts, answers = asked
    samples = [replace(to_sample(*one), group_id=place) for place, one in enumerate(zip(prompts, answers, strict=True))]
    served = ServedReading(server).read_top(prompts, answers, LISTED, 1.0)
    with torch.no_grad():
        _, expected = logprobs(teacher, samples)
    model, own = logprobs(MODEL, samples)
    divergences = []
    for row, answer, nu, pi in zip(served, answers, expected, own, strict=True):
        top, ids = nu.topk(LISTED)
        chosen = nu.gather(-1, torch.tensor(answer)[:, None])
        torch.testing.assert_close(row[:, :1], chosen, atol=GAP, rtol=0)
        torch.testing.assert_close(row[:, 1 : 1 + LISTED], top, atol=GAP, rtol=0)
        assert row[:, 1 + LISTED :].long().tolist() == ids.tolist()
        p, q = (
            torch.cat([listed := one.exp().gather(-1, ids), 1 - listed.sum(-1, keepdim=True)], -1) for one in (pi, nu)
        )
        divergences.append((q * (q / p).log()).sum(-1))
    loss = torch.cat(divergences).mean()
    loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    learned = Learner(
        logprobs(MODEL, [])[0].float(), torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 0.0
    )  # a second copy of the policy, in r1's own learner
    ready = [
        replace(with_top(one, row.float(), LISTED), advantages=torch.zeros(len(one.token_ids)))
        for one, row in zip(samples, served, strict=True)
    ]
    ready = learned.add_logprobs(ready)
    metrics = learned.forward_backward(ready, Objective(divergence="top"))
    assert loss.item() > 0.01
    assert metrics["distillation_loss"] == pytest.approx(loss.item(), abs=GAP)
    for name, param in learned.model.named_parameters():
        if name in gradients:
            gap = (param.grad - gradients[name]).norm() / gradients[name].norm().clamp(min=1e-6)
            assert gap < 10 * GAP, name


def test_its_log_probs_give_the_advantages_of_the_local_model(
    server: str, teacher: Path, asked: tuple[list[Prompt], list[list[int]]]
) -> None:
    prompts, answers = asked
    samples = [to_sample(*one) for one in zip(prompts, answers, strict=True)]
    with torch.no_grad():
        nus, pis = (logprobs(path, samples)[1] for path in (teacher, MODEL))
    rows = ServedReading(server).read_logprobs(prompts, answers, [0] * len(answers))
    for sample, row, answer, nu, pi in zip(samples, rows, answers, nus, pis, strict=True):
        chosen = torch.tensor(answer)[:, None]
        old = torch.zeros(len(sample.token_ids))
        old[sample.loss_mask] = pi.gather(-1, chosen)[:, 0].float()
        ready = with_top(replace(sample, old_logprobs=old, advantages=old * 0), torch.tensor(row)[:, None], 0)
        (found,) = Distillation(coef=0.5, clip=1.0).add([ready], [True])
        expected = 0.5 * (nu - pi).gather(-1, chosen)[:, 0].clamp(-1.0, 1.0).float()
        torch.testing.assert_close(found.advantages[sample.loss_mask], expected, atol=GAP, rtol=0)


def test_more_than_it_lists_is_refused_before_the_run_with_both_numbers_and_the_flag(
    r1: R1, server: str, tmp_path: Path
) -> None:
    words = [*STEPS, f"worker.teacher.urls={server}", *FORMS["topk"], f"trainer.save_checkpoint_path={tmp_path}"]
    result = r1("train", QUICKSTART, *SMALL, *words, f"algorithm.distillation.topk={LISTED + 1}", ok=False)
    assert result.exit_code == 2
    expected = f"lists at most {LISTED} likely tokens, and algorithm.distillation.topk is {LISTED + 1}: start it with "
    assert f"{expected}vllm serve --max-logprobs {LISTED + 1}, or set algorithm.distillation.topk={LISTED}" in " ".join(
        result.output.split()
    )
    assert not (tmp_path / "experiment_log.jsonl").exists()
    r1("train", QUICKSTART, *SMALL, *words, f"algorithm.distillation.topk={LISTED}")
    assert [record["distillation/without_teacher"] for record in read_log(tmp_path)] == [0.0, 0.0]
    assert {len(top) for row in rows_of(tmp_path) for top in row["teacher_top_ids"]} == {LISTED}


def test_it_says_how_long_a_text_it_reads_and_that_is_the_limit(server: str) -> None:
    reading, text = ServedReading(server), [5] * (LENGTH - 1)
    require_length_of_servers(reading, "urls", LENGTH - 1)
    with pytest.raises(
        ModelError, match=rf"at most {LENGTH} tokens.*have {LENGTH + 1}: .*--max-model-len {LENGTH + 1}"
    ):
        require_length_of_servers(reading, "urls", LENGTH)
    reading.try_top(reading.bases[0], text, LISTED)
    with pytest.raises(Exception, match="400"):
        reading.try_top(reading.bases[0], [*text, 5], LISTED)


@pytest.mark.parametrize("topk", [0, LISTED])
def test_one_that_gives_logits_is_refused(
    teacher: Path, policy: ModelFiles, tmp_path_factory: pytest.TempPathFactory, topk: int, logits_server: str
) -> None:
    settings = OneTeacherConfig.model_validate({"urls": logits_server})
    with pytest.raises(ModelError, match=r"gives no log-probs.*these are logits.*--logprobs-mode"):
        open_servers(settings, "worker.teacher", policy, topk)


@pytest.fixture(scope="module")
def logits_server(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    words = ["vllm", "serve", str(teacher), "--port", "8000", "--logprobs-mode=processed_logits"]
    with serving(words, tmp_path_factory.mktemp("logits")) as address:
        yield address
