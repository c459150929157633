"""Distillation: its settings, its teacher's tokenizer, and its term in the advantages."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from r1_cli.build.algorithm import build_update
from r1_cli.build.teacher_model import PROBES, find_difference, require_same_tokenizer
from r1_cli.config import ConfigError, load_config
from r1_cli.models.load import ModelError
from r1_cli.plan.announce import describe_distillation
from r1_cli.plan.memory import estimate
from r1_cli.plan.phases import find_phases
from r1_cli.train.teaching import SAME, AdvantageTeacher, LossTeacher
from r1_core.advantages.distillation import Distillation, NoTask
from r1_core.types import Sample

BASE = ["data.train_files=owner/rows@train", "worker.actor.model.model_path=owner/model"]
TEACHER = "worker.teacher.model.model_path=owner/teacher"
NONE = "algorithm.disable_kl=true"


def config_of(*words):
    return load_config([*BASE, *words])[0]


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_teacher_takes_the_place_of_the_reward_and_one_answer_is_enough():
    config = config_of(TEACHER, NONE, "worker.rollout.n=1")
    assert not config.learns_task
    update = build_update(config, updates_per_step=1)
    assert isinstance(update.compute_advantages.estimator, NoTask)
    assert update.needs == {"old_logprobs"}
    assert update.objective.divergence is None


def test_the_loss_compares_with_the_teacher_and_needs_nothing_before_it():
    words = ["algorithm.distillation.form=loss", "algorithm.distillation.divergence=jsd", "worker.rollout.n=1"]
    update = build_update(config_of(TEACHER, NONE, *words, "algorithm.distillation.coef=0.5"), updates_per_step=1)
    assert (update.objective.divergence, update.objective.distillation_coef) == ("jsd", 0.5)
    assert not update.needs


@pytest.mark.parametrize("form", ["advantage", "loss"])
def test_task_reward_keeps_the_estimator_and_its_needs(form):
    words = ["algorithm.distillation.task_reward=true", f"algorithm.distillation.form={form}", "worker.rollout.n=1"]
    with pytest.raises(ConfigError) as caught:
        config_of(TEACHER, NONE, *words)
    assert {problem.key for problem in caught.value.problems} == {"worker.rollout.n", "worker.reward.reward_function"}
    config = config_of(TEACHER, NONE, *words[:2], "worker.reward.reward_function=math")
    assert type(build_update(config, updates_per_step=1).compute_advantages.estimator).__name__ == "GRPO"


def test_without_a_teacher_nothing_changes():
    config = config_of("worker.reward.reward_function=math", "algorithm.distillation.form=loss")
    update = build_update(config, updates_per_step=1)
    assert config.learns_task
    assert update.objective.divergence is None
    assert not isinstance(update.compute_advantages.estimator, NoTask)


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (["algorithm.distillation.divergence=jsd"], "algorithm.distillation.divergence", "form=loss"),
        (
            ["algorithm.distillation.form=loss", "algorithm.disable_kl=false", "algorithm.kl_penalty=full"],
            "algorithm.kl_penalty",
            "set another, or algorithm.disable_kl=true",
        ),
        (["algorithm.disable_kl=false", "algorithm.use_kl_loss=false"], "algorithm.use_kl_loss", "set true"),
        (["algorithm.adv_estimator=gae"], "algorithm.adv_estimator", "task_reward=true"),
        (["worker.teacher.model.model_path=./no/such"], "worker.teacher.model.model_path", "no such folder"),
        (["algorithm.distillation.clip=0"], "algorithm.distillation.clip", "more than 0"),
    ],
)
def test_settings_that_do_not_go_together_are_named(words, key, message):
    with pytest.raises(ConfigError) as caught:
        config_of(TEACHER, NONE, "worker.rollout.n=1", *words)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert message in problem.message


def test_the_plan_counts_its_weights_and_says_what_is_learned():
    model = "examples/quickstart/model"
    words = [
        f"worker.actor.model.model_path={model}",
        "data.max_response_length=99",
        "worker.reward.reward_function=math",
    ]
    without = estimate(config_of(*words))
    words += [f"worker.teacher.model.model_path={model}", NONE]
    with_it = estimate(config_of(*words))
    assert without.teacher == 0
    assert with_it.teacher == 2 * with_it.parameters // 8  # bf16, on 8 devices
    assert with_it.total == without.total - without.reference + with_it.teacher
    assert describe_distillation(config_of(*words)) == (
        "distillation: 1 · (log teacher − log policy) of each sampled token, in its advantage; "
        "rewards are shown and not trained on"
    )
    kept = config_of(*words, "worker.teacher.offload=false")
    phases = {phase.name: phase.parts for phase in find_phases(kept, with_it)}
    assert all(parts["teacher"] == with_it.teacher for parts in phases.values())
    assert not any("teacher" in phase.parts for phase in find_phases(config_of(*words), with_it))


# --- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizer(words=("a", "b", "c", "<end>"), *, split=".", end="<end>"):
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*words, "?"])}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, additional_special_tokens=["c", "<end>"] if "c" in words else []
    )


def test_equal_tokenizers_pass_and_there_are_64_probes():
    assert len(set(PROBES)) == 64
    require_same_tokenizer("teacher", tokenizer(), tokenizer())


def test_of_equal_size_and_other_words_is_refused_with_the_way_out():
    with pytest.raises(ModelError, match=r"teacher=x: 2 of the policy's 5 tokens are others.*'b', 1, is its 2.*r1 sft"):
        require_same_tokenizer("teacher=x", tokenizer(), tokenizer(("a", "c", "b", "<end>")))


def test_a_word_that_the_teacher_lacks_is_refused_and_one_more_is_not():
    small, large = tokenizer(("a", "b", "<end>"), end="<end>"), tokenizer()
    assert "'c', 2, is unknown to it" in str(find_difference(tokenizer(), small))
    more = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, eos_token="<end>")
    more.add_tokens(["<image>"])
    assert find_difference(large, more) is None
    assert "<image>" in str(find_difference(more, large))


def test_equal_words_that_are_split_otherwise_are_refused():
    assert find_difference(tokenizer(), tokenizer(split=r"\s+")).startswith("it splits 'The quick brown")


def test_another_end_token_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "r1"):
        require_same_tokenizer("teacher", tokenizer(), tokenizer(end="c"))
    assert "it ends answers with 'c', the policy with '<end>'" in caplog.text


# --- the term in the advantages --------------------------------------------------------------------------------------


class Learner:
    """Gives the policy's log-probs, shifted, as the teacher's."""

    def __init__(self, shift):
        self.shift = shift

    def add_logprobs(self, samples, needs):
        assert set(needs) == {"teacher_logprobs"}
        return [replace(one, teacher_logprobs=one.old_logprobs + self.shift) for one in samples]


def samples():
    mask = torch.tensor([False, True, True])
    return [
        Sample(
            torch.tensor([1, 2, 3]), mask, torch.arange(3)[None], group_id=i, reward=0.0,
            old_logprobs=-1.0 * mask, advantages=2.0 * mask,
        )
        for i in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize(("task_reward", "expected"), [(False, 0.25), (True, 2.25)])
def test_the_teacher_adds_to_the_advantages_or_replaces_them(task_reward, expected):
    teacher = AdvantageTeacher(Learner(0.5), Distillation(coef=0.5, task_reward=task_reward))
    taught = teacher.teach(samples(), [])
    assert [one.advantages.tolist() for one in taught] == [[0.0, expected, expected]] * 2
    assert teacher.metrics(taught, [])["distillation/kl"] == -0.5


def test_a_teacher_that_is_the_policy_is_told_once(caplog):
    teacher = AdvantageTeacher(Learner(0.0), Distillation())
    with caplog.at_level(logging.WARNING, "r1"):
        for _ in range(2):
            found = teacher.metrics(teacher.teach(samples(), []), [])
    assert json.dumps(found["distillation/kl"]) == "0.0"
    assert caplog.messages == [SAME]


def test_the_loss_reports_its_divergence():
    teacher, before = LossTeacher(), samples()
    assert teacher.teach(before, []) == before
    updates = [{"distillation_loss": 0.25}, {"distillation_loss": 0.75}]
    assert teacher.metrics(before, updates) == {"distillation/divergence": 0.5}
    assert teacher.metrics(before, []) == {}
