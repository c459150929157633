"""Runs that distil: all forms, on one rank and on two, from a server in another process, and what they record."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranked_runs
import ranks
import torch
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log
from forked import Forked
from patience import eventually
from safetensors.torch import load_file, save_file

from r1_cli.runs.reader import RunReader
from r1_rewards.services.endpoint import Patience

MODEL = ROOT / "examples/quickstart/model"
ADDRESS = re.compile(r"^(http://127\.0\.0\.1:\d+)\n", re.M)
STEPS = [
    "trainer.max_steps=2", "trainer.save_freq=-1", "trainer.val_freq=-1", "trainer.val_before_train=false",
    "worker.reward.reward_function=null", "worker.rollout.n=1", "worker.actor.global_batch_size=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_copy(tmp_path_factory.mktemp("teacher"))


def noisy_copy(folder: Path, seed: int = 0) -> Path:
    """The quickstart's model with noise on its weights, in this folder."""
    for file in MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(seed)
    weights = load_file(MODEL / "model.safetensors")
    noisy = {name: value + 0.01 * torch.randn(value.shape).to(value.dtype) for name, value in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


TOP = ["algorithm.distillation.form=loss", "algorithm.distillation.divergence=forward_kl"]
FORMS = {
    "advantage": [],
    "loss": ["algorithm.distillation.form=loss"],
    "topk": [*TOP, "algorithm.distillation.topk=4"],
}


@contextmanager
def serving(model: Path, *options: str) -> Iterator[str]:
    """The address of the model in a process of its own."""
    process = Forked(str(model), *options, program=(ROOT / "tests/teacher_server.py").read_text())
    try:
        assert eventually(lambda: process.poll() is not None or ADDRESS.search(process.printed()))
        found = ADDRESS.search(process.printed())
        assert found, process.printed()
        yield found[1]
    finally:
        process.kill()
        process.wait()


def rows_of(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    return RunReader(folder).samples(step)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["loss", "topk"])
def test_two_ranks_distil_as_one_does(r1: R1, tmp_path: Path, teacher: Path, form: str) -> None:
    """Advantages from a teacher on two ranks, and ranks under Ray, are those of test_distillation_numbers."""
    words = ["train", QUICKSTART, *SMALL, *STEPS, f"worker.teacher.model.model_path={teacher}", *FORMS[form]]
    assert "distillation: 1 · " in r1(*words, f"trainer.save_checkpoint_path={tmp_path / 'one'}").output
    found = [read_log(tmp_path / "one"), *ranks.run(ranked_runs.train, tmp_path / "two", *words)]
    for folder in (tmp_path / "one", tmp_path / "two/0", tmp_path / "two/1"):
        for row in rows_of(folder):
            assert row["teacher_logprobs"] is None if form == "loss" else min(row["teacher_logprobs"]) < 0
            assert (row["teacher_top"] is None) == (form != "topk")
            assert {len(one) for one in row["teacher_top_ids"] or ()} == ({4} if form == "topk" else set())
    for one, *others in zip(*found, strict=True):
        assert one["actor/grad_norm"] > 1e-3
        for two in others:
            for key in ("distillation/divergence", "actor/grad_norm", "critic/advantages/mean"):
                assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["advantage", "topk"])
def test_a_teacher_with_pictures_behind_http_is_the_one_that_is_loaded(
    r1: R1, tmp_path: Path, teacher: Path, form: str
) -> None:
    """The first step, in which the policy is the same. The server resizes pictures and finds positions by itself."""
    runs = {}
    with serving(teacher) as url:
        for kind, name in (("urls", url), ("model.model_path", str(teacher))):
            folder = runs[kind] = tmp_path / kind
            words = [*STEPS, f"worker.teacher.{kind}={name}", *FORMS[form], f"trainer.save_checkpoint_path={folder}"]
            result = r1("train", QUICKSTART, *SMALL, *words)
            assert result.exit_code == 0, result.output
    served, loaded = (rows_of(folder) for folder in runs.values())
    for one, other in zip(served, loaded, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["teacher_logprobs"] == pytest.approx(other["teacher_logprobs"], abs=1e-3)
        assert one["advantages"] == pytest.approx(other["advantages"], abs=1e-3)
        for mine, theirs in zip(one["teacher_top"] or (), other["teacher_top"] or (), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
    logs = [read_log(folder)[0] for folder in runs.values()]
    name = "distillation/kl" if form == "advantage" else "distillation/divergence"
    assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-3)
    assert abs(logs[0][name]) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two ranks", "an adapter"])
def test_a_policy_that_teaches_itself_goes_on_from_its_checkpoint_to_the_bit(r1: R1, tmp_path: Path, kind: str) -> None:
    words = ["train", QUICKSTART, *SMALL, *STEPS, *FORMS["topk"], "worker.teacher.model.model_path=policy"]
    words += ["algorithm.distillation.sync=ema:0.25", "worker.actor.optim.lr_warmup_steps=0", "trainer.max_steps=3"]
    once, again = tmp_path / "once", tmp_path / "again"
    runs = (once, ["trainer.save_freq=2"]), (again, [])
    if kind == "two ranks":
        once, again = once / "0", again / "0"
    middle = once / "global_step_2"
    for folder, more in runs:
        more = more or [f"trainer.load_checkpoint_path={middle}"]
        if kind == "two ranks":
            ranks.run(ranked_runs.train, folder, *words, *more)
        else:
            lora = ["worker.actor.model.lora.rank=4", "worker.actor.model.lora.alpha=8"]
            r1(*words, *more, *lora, f"trainer.save_checkpoint_path={folder}")
    assert any((middle / "actor").glob("teacher*.safetensors"))
    names = ("tokens", "teacher_logprobs", "teacher_top", "teacher_top_ids")
    for one, other in zip(rows_of(once, 3), rows_of(again, 3), strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]
        assert one["teacher_logprobs"] != one["old_logprobs"]


SMALLER = "worker.teacher.failure_share=0.0"


@pytest.mark.slow
def test_a_server_that_resizes_pictures_otherwise_ends_the_run_with_both_numbers(
    r1: R1, tmp_path: Path, teacher: Path
) -> None:
    with serving(teacher, "--max-pixels=3136") as url:
        words = [*STEPS, f"worker.teacher.urls={url}", SMALLER, f"trainer.save_checkpoint_path={tmp_path}"]
        result = r1("train", QUICKSTART, *SMALL, *words, ok=False)
    assert re.search(r"the server has read \d+ tokens, not \d+: another tokenizer, or pictures resized", result.output)
    assert "worker.teacher.failure_share=0" in result.output


@pytest.mark.slow
def test_a_dead_server_is_replaced_by_another_and_without_one_the_run_ends(
    r1: R1, tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second server dies before the run's first question about log-probs; a slow one is only slow."""
    with serving(teacher, "--slow=0.05") as url, serving(teacher, "--dies-after=1") as dying:
        words = [*STEPS, f"worker.teacher.urls='{url},{dying}'", SMALLER]
        result = r1("train", QUICKSTART, *SMALL, *words, f"trainer.save_checkpoint_path={tmp_path / 'two'}")
        assert result.exit_code == 0, result.output
    assert [record["distillation/without_teacher"] for record in read_log(tmp_path / "two")] == [0.0, 0.0]
    monkeypatch.setattr("r1_cli.build.rewards.served_model.Patience", partial(Patience, deadline=5.0))
    with serving(teacher, "--dies-after=6") as dying:
        words = [*STEPS, f"worker.teacher.urls={dying}", f"trainer.save_checkpoint_path={tmp_path / 'one'}"]
        result = r1("train", QUICKSTART, *SMALL, *words, ok=False)
    assert "run the same command again when it answers" in result.output
    assert (tmp_path / "one/global_step_1").is_dir()
