"""The numbers of distillation beside other settings, computed again by transformers' own models from the record."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ranked_runs
import ranks
import torch
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log
from PIL import Image
from test_distillation import FORMS, MODEL, STEPS, noisy_copy, rows_of
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

Rows = list[dict[str, Any]]
TRAIN = ROOT / "examples/quickstart/train.parquet"
LORA = ["worker.actor.model.lora.rank=4", "worker.actor.model.lora.alpha=8"]
ONLINE = ["data.curriculum.by=online", "worker.reward.reward_function=examples/quickstart/reward.py:compute_score"]
PROCESSOR, ROWS = AutoProcessor.from_pretrained(MODEL), pq.read_table(TRAIN)
SMALL_PIXELS, SHARP = 56 * 56, 112 * 112
GAP = 1e-4  # nats; models in float32 against float64


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [noisy_copy(tmp_path_factory.mktemp("teacher"), seed) for seed in (0, 1)]


def read(folder: Path, rows: Rows, pixels: int = 50176, prompts: Sequence[list[int]] | None = None) -> list[Tensor]:
    """The log-probs [n, V] of a model in place of each row's own tokens, each row alone, behind its prompt or these."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    found = []
    for row, prompt in zip(rows, prompts or [row["prompt_tokens"] for row in rows], strict=True):
        shown = PROCESSOR.image_processor(picture_of(row), size=size_of(pixels), return_tensors="pt")
        token_ids = torch.tensor([[*prompt, *row["tokens"]]])
        kinds = (token_ids == model.config.image_token_id).int()
        with torch.no_grad():
            logits = model(input_ids=token_ids, **shown, mm_token_type_ids=kinds, use_cache=False).logits[0]
        found.append(logits.log_softmax(-1)[len(prompt) - 1 : -1])
    return found


def size_of(pixels: int) -> dict[str, int]:
    return {"shortest_edge": 3136, "longest_edge": pixels}


def cells_of(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = ROWS.slice(int(row["prompt_id"].rpartition(":")[2]) - 1, 1).to_pylist()[0]
    return found


def picture_of(row: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(cells_of(row)["images"][0]["bytes"]))


def prompt_of(row: dict[str, Any], pixels: int, hint: str = "") -> list[int]:
    """The tokens of the row's prompt by the model's own processor, behind a hint from its answer."""
    cells = cells_of(row)
    content = [{"type": "image"}, {"type": "text", "text": cells["problem"].removeprefix("<image>")}]
    messages = [{"role": "user", "content": content}]
    if hint:
        told = {"type": "text", "text": hint.format(cells["answer"])}
        messages.insert(0, {"role": "system", "content": [told]})
    text = PROCESSOR.apply_chat_template(messages, add_generation_prompt=True)
    found = PROCESSOR(text=[text], images=[picture_of(row)], images_kwargs={"size": size_of(pixels)})
    token_ids: list[int] = found["input_ids"][0]
    return token_ids


def of_tokens(rows: Rows, logprobs: Sequence[Tensor]) -> list[Tensor]:
    return [one.gather(-1, torch.tensor(row["tokens"])[:, None])[:, 0] for row, one in zip(rows, logprobs, strict=True)]


def column(rows: Rows, name: str) -> Tensor:
    return torch.cat([torch.tensor(row[name], dtype=torch.float64) for row in rows])


def trained(r1: R1, folder: Path, *words: str, world: int = 1) -> tuple[Rows, dict[str, Any], Path]:
    """The answers of the second step, what it logged, and the weights that it began with.

    Args:
        world: train on so many gloo ranks.
    """
    more = ["trainer.save_freq=1", "worker.actor.optim.lr_warmup_steps=0", "worker.actor.optim.lr=1e-2"]
    words = ("train", QUICKSTART, *SMALL, *STEPS, *more, *words)
    if world == 1:
        r1(*words, f"trainer.save_checkpoint_path={folder}")
    else:
        ranks.run(ranked_runs.train, folder, *words, world=world)
        folder /= "0"
    begun = folder / "global_step_1"
    if LORA[0] in words:
        r1("merge", begun, "--output", folder / "merged")
    return rows_of(folder, 2), read_log(folder)[1], folder / "merged" if LORA[0] in words else begun / "actor"


@pytest.mark.parametrize(
    ("words", "world"),
    [
        (["trainer.max_staleness=1"], 1),
        pytest.param(["trainer.max_staleness=1", "worker.actor.padding_free=false", *LORA], 1, marks=pytest.mark.slow),
        ([*ONLINE, "worker.actor.ppo_epochs=2"], 1),
        pytest.param([], 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_advantages_beside(r1: R1, tmp_path: Path, teachers: list[Path], words: list[str], world: int) -> None:
    """A = clip(log ν − log π_old), π_old the learner's, with which stale samples are corrected."""
    teacher = f"worker.teacher.model.model_path={teachers[0]}"
    rows, logged, policy = trained(r1, tmp_path, teacher, "algorithm.distillation.clip=0.5", *words, world=world)
    nu, old = (torch.cat(of_tokens(rows, read(path, rows))) for path in (teachers[0], policy))
    torch.testing.assert_close(column(rows, "teacher_logprobs"), nu, atol=GAP, rtol=0)
    torch.testing.assert_close(column(rows, "old_logprobs"), old, atol=GAP, rtol=0)
    advantages = (nu - old).clamp(-0.5, 0.5)
    torch.testing.assert_close(column(rows, "advantages"), advantages, atol=2 * GAP, rtol=0)
    assert logged["distillation/kl"] == pytest.approx(-advantages.mean().item(), abs=GAP)
    assert (advantages.abs() > 0.1).any()
    if "trainer.max_staleness=1" in words:
        weights = (old - column(rows, "rollout_logprobs")).exp().clamp(max=2.0)
        assert (weights - 1).abs().max() > 0.01
        assert logged["actor/pg_loss"] == pytest.approx(-(weights * advantages).mean().item(), abs=2 * GAP)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sharper_picture_for_the_policy_at_its_start(r1: R1, tmp_path: Path, world: int) -> None:
    """The answer's positions go on behind the teacher's own, longer prompt."""
    itself = ["worker.teacher.model.model_path=policy", "algorithm.distillation.sync=never"]
    pixels = [f"data.max_pixels={SMALL_PIXELS}", f"worker.teacher.max_pixels={SHARP}"]
    rows, _, policy = trained(r1, tmp_path, *itself, *pixels, world=world)
    sharp = [prompt_of(row, SHARP) for row in rows]
    assert all(len(one) == len(row["prompt_tokens"]) + 12 for one, row in zip(sharp, rows, strict=True))
    nu = torch.cat(of_tokens(rows, read(MODEL, rows, SHARP, sharp)))
    old = torch.cat(of_tokens(rows, read(policy, rows, SMALL_PIXELS)))
    torch.testing.assert_close(column(rows, "teacher_logprobs"), nu, atol=GAP, rtol=0)
    torch.testing.assert_close(column(rows, "advantages"), (nu - old).clamp(-10, 10), atol=2 * GAP, rtol=0)
    assert (nu - torch.cat(of_tokens(rows, read(MODEL, rows, SMALL_PIXELS)))).abs().max() > 0.1


def test_the_answer_before_the_prompt_of_a_loaded_teacher(r1: R1, tmp_path: Path, teachers: list[Path]) -> None:
    (tmp_path / "hint.jinja").write_text("It is {{ answer }}.")
    words = [f"worker.teacher.model.model_path={teachers[0]}", f"worker.teacher.context={tmp_path}/hint.jinja"]
    words += ["worker.teacher.style=before", *FORMS["topk"]]
    rows, logged, policy = trained(r1, tmp_path / "run", *words)
    told = [prompt_of(row, 50176, "It is {}.") for row in rows]
    q, p = torch.cat(read(teachers[0], rows, prompts=told)).exp(), torch.cat(read(policy, rows)).exp()
    top, ids = q.topk(4)
    listed = torch.tensor([one for row in rows for one in row["teacher_top"]], dtype=torch.float64)
    torch.testing.assert_close(listed.exp(), top, atol=GAP, rtol=0)
    p, q = (torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (p, q))
    divergence = (q * (q.clamp(min=1e-30) / p.clamp(min=1e-30)).log()).sum(-1).mean().item()
    assert logged["distillation/divergence"] == pytest.approx(divergence, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        pytest.param("loss", ["trainer.max_staleness=1"], marks=pytest.mark.slow),
        ("topk", ["trainer.max_staleness=1", *LORA]),
        pytest.param("loss", [*ONLINE, *LORA, "worker.actor.padding_free=false"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_divergence_beside(r1: R1, tmp_path: Path, teachers: list[Path], form: str, words: list[str]) -> None:
    """Over the tokens that were sampled, whichever weights did, between the policy as it is and the teacher."""
    teacher = f"worker.teacher.model.model_path={teachers[0]}"
    rows, logged, policy = trained(r1, tmp_path, teacher, *FORMS[form], *words)
    q, p = (torch.cat(read(path, rows)).exp() for path in (teachers[0], policy))
    if form == "topk":
        ids = q.topk(4).indices
        p, q = (torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (p, q))
        divergence = torch.where(q > 0, q * (q.clamp(min=1e-30) / p.clamp(min=1e-30)).log(), 0.0).sum(-1)
    else:
        divergence = torch.where(p > 0, p * (p.clamp(min=1e-30) / q.clamp(min=1e-30)).log(), 0.0).sum(-1)
    assert divergence.mean() > 1e-4
    assert logged["distillation/divergence"] == pytest.approx(divergence.mean().item(), rel=1e-2, abs=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(["trainer.max_staleness=1"], marks=pytest.mark.slow),
        pytest.param(["trainer.n_gpus_per_node=2", *LORA], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_each_source_is_judged_by_its_teacher_and_one_without_by_the_reward(
    r1: R1, tmp_path: Path, teachers: list[Path], words: list[str]
) -> None:
    """The first is the learner's, the second is in the main process."""
    sources = [{"name": name, "files": f"{TRAIN}[:{count}]"} for name, count in (("a", 64), ("b", 65), ("c", 66))]
    words = [
        *words, f"data.sources={json.dumps(sources)}", "data.train_files=null", "data.rollout_batch_size=12",
        "worker.actor.global_batch_size=12", "worker.rollout.n=2", f"worker.teacher.model.model_path={teachers[0]}",
        f"worker.teacher.sources.b.model.model_path={teachers[1]}", "worker.teacher.sources.c=null", ONLINE[1],
    ]  # fmt: skip
    rows, _, policy = trained(r1, tmp_path, *words)
    assert {row["source"] for row in rows} == {"a", "b", "c"}
    for name, teacher in (("a", teachers[0]), ("b", teachers[1])):
        own = [row for row in rows if row["source"] == name]
        nu, old = (torch.cat(of_tokens(own, read(path, own))) for path in (teacher, policy))
        torch.testing.assert_close(column(own, "teacher_logprobs"), nu, atol=GAP, rtol=0)
        torch.testing.assert_close(column(own, "advantages"), (nu - old).clamp(-10, 10), atol=2 * GAP, rtol=0)
    alone = [row for row in rows if row["source"] == "c"]
    for one, two in zip(alone[::2], alone[1::2], strict=True):
        gap = (one["reward"] - two["reward"]) / 2  # of two answers to one prompt, from their mean
        expected = gap / (2**0.5 * abs(gap) + 1e-6)
        assert all(value == pytest.approx(expected, abs=1e-4) for value in one["advantages"])
        assert torch.tensor(one["teacher_logprobs"]).isnan().all()


@pytest.mark.slow
def test_a_step_of_distillation_replays_bit_for_bit(r1: R1, tmp_path: Path, teachers: list[Path]) -> None:
    words = [f"worker.teacher.model.model_path={teachers[0]}", "trainer.max_staleness=1", *FORMS["topk"]]
    trained(r1, tmp_path, *words)
    result = r1("replay", tmp_path, "--step", "2")
    assert "step 2 is the same to the bit: 4 answers" in result.output
