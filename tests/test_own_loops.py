"""The examples on the parts of `r1_cli.open`: fine-tuning, preferences and distillation learn."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from endtoend import QUICKSTART, ROOT

import r1_cli
from r1_cli.config import RunConfig, load_config

NAMES = ["one_file_sft", "one_file_dpo", "one_file_distillation"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configure(settings: list[str], prompts: int) -> RunConfig:
    sizes = [f"data.rollout_batch_size={prompts}", f"worker.actor.global_batch_size={prompts}"]
    return load_config([*settings, *sizes])[0]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_at_most_sixty_lines(name: str) -> None:
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_step_without_an_answer_to_train_is_left_out(name: str) -> None:
    stream, prompts = SimpleNamespace(batch=lambda step: [0]), ["How many?"]
    parts = SimpleNamespace(stream=stream, prompts=prompts, sample=lambda prompts, seed: [])
    assert list(load(name).train(parts, 2)) == []


@dataclass(frozen=True)
class FineTuned:
    folder: Path
    before: float
    after: float


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> FineTuned:
    module, folder = load("one_file_sft"), tmp_path_factory.mktemp("fine-tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with r1_cli.open(configure([f"config={QUICKSTART}"], 8)) as parts:
            before = module.accuracy(parts)
            for _ in module.train(parts, 10):
                pass
            parts.save(folder)
            return FineTuned(folder, before, module.accuracy(parts))


@pytest.mark.slow
def test_fine_tuning_learns_from_the_models_own_right_answers(fine_tuned: FineTuned) -> None:
    assert fine_tuned.after > fine_tuned.before + 0.1


@pytest.mark.slow
def test_fine_tuning_on_answers_right_or_wrong_gains_nothing(fine_tuned: FineTuned) -> None:
    module = load("one_file_sft")
    with r1_cli.open(configure([f"config={QUICKSTART}"], 8)) as parts:
        for _ in module.train(parts, 10, least=0.0):
            pass
        assert module.accuracy(parts) < fine_tuned.before + 0.05


@pytest.mark.slow
def test_a_student_learns_from_the_folder_of_the_fine_tuned_model(fine_tuned: FineTuned) -> None:
    module = load("one_file_distillation")
    settings = [*module.SETTINGS, f"worker.teacher.model.model_path={fine_tuned.folder}"]
    with r1_cli.open(configure(settings, 24)) as parts:
        kl = [metrics["kl"] for metrics in module.train(parts, 10)]
        assert kl[-1] < 0.3 * kl[0], kl
        assert module.accuracy(parts) > fine_tuned.before + 0.1


@pytest.mark.slow
def test_the_policy_as_its_own_teacher_has_no_divergence() -> None:
    module = load("one_file_distillation")
    with r1_cli.open(
        configure([*module.SETTINGS, "worker.teacher.model.model_path=examples/quickstart/model"], 8)
    ) as parts:
        assert [metrics["kl"] for metrics in module.train(parts, 1)] == pytest.approx([0.0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [1.0, 0.0])
def test_preferring_right_answers_teaches_counting_and_wrong_ones_unteach_it(chosen: float) -> None:
    module = load("one_file_dpo")
    with r1_cli.open(configure(module.SETTINGS, 8)) as parts:
        before = module.accuracy(parts)
        for _ in module.train(parts, 10, chosen):
            pass
        gain = module.accuracy(parts) - before
    assert gain > 0.1 if chosen else gain < -0.1, gain
