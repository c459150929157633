"""Distillation: its settings, its teacher's tokenizer, and its term in the advantages."""

import json
import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cli_references import Canned, prompt_of

from r1_cli.build.algorithm import build_update
from r1_cli.build.teacher_prompts import put_before, rewrite_prompt
from r1_cli.config import ConfigError, load_config
from r1_cli.plan.announce import describe_distillation
from r1_cli.plan.estimate.cards import read_cards
from r1_cli.plan.estimate.times import Assumptions, find_times
from r1_cli.plan.memory import estimate
from r1_cli.plan.phases import find_phases, teacher_prompt
from r1_cli.train.groups.group import Group
from r1_cli.train.teaching import SAME, AdvantageTeacher, LossTeacher, TeacherModel, Teachers, TopTeacher
from r1_core.advantages.distillation import Distillation, NoTask
from r1_core.types import Sample
from r1_data.types import DataError, Example
from r1_rewards.types import RewardFailure

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
        (["worker.teacher.urls=http://a:1"], "worker.teacher.urls", "set one of them"),
        (["worker.teacher.model.model_path=policy"], "worker.teacher.model.model_path", "set context, max_pixels"),
        (["worker.teacher.style=before"], "worker.teacher.style", "set context"),
        (["algorithm.distillation.sync=ema:2"], "algorithm.distillation.sync", "as in ema:0.01"),
        (["algorithm.distillation.sync=always"], "algorithm.distillation.sync", "as in ema:0.01"),
        (["worker.teacher.min_pixels=20000000"], "worker.teacher.min_pixels", "at most data.max_pixels (4194304)"),
        (["worker.teacher.max_pixels=3136"], "worker.teacher.max_pixels", "at least data.min_pixels (262144): set"),
        (
            ["worker.teacher.min_pixels=9", "worker.teacher.max_pixels=8"],
            "worker.teacher.min_pixels",
            "at most worker.teacher.max_pixels (8)",
        ),
        (["worker.teacher.context=./no.jinja"], "worker.teacher.context", "no such file"),
        (
            ["algorithm.distillation.form=loss", "worker.teacher.max_pixels=9999999"],
            "algorithm.distillation.form",
            "or form=advantage",
        ),
        (
            ["algorithm.online_filtering=true"],
            "algorithm.online_filtering",
            "there is no worker.reward.reward_function",
        ),
        (["data.curriculum.by=online"], "data.curriculum.by", "there is no worker.reward.reward_function"),
        (["algorithm.distillation.topk=4"], "algorithm.distillation.topk", "form=loss"),
        (
            ["algorithm.distillation.topk=4", "algorithm.distillation.form=loss"],
            "algorithm.distillation.divergence",
            "verl #5041",
        ),
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


@pytest.mark.parametrize("reader", ["algorithm.online_filtering=true", "data.curriculum.by=online"])
def test_rewards_that_are_only_shown_may_filter_and_draw_rows(reader):
    assert not config_of(TEACHER, NONE, "worker.reward.reward_function=math", reader).learns_task


SHARPER = f"{8 * 28 * 28}"


@pytest.mark.parametrize(
    ("words", "longer"),
    [
        ([f"worker.teacher.max_pixels={SHARPER}"], 2 * 6),  # of two pictures: 8 tokens where the policy has 2
        ([f"worker.teacher.max_pixels={SHARPER}", "worker.teacher.max_prompt_length=90"], 50),
        (["worker.teacher.image_key=crops"], 0),
        (["algorithm.distillation.sync=never"], 0),
    ],
)
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_plan_counts_the_longer_prompts_of_a_teacher(words, longer, dynamic):
    config = config_of(
        "worker.actor.model.model_path=examples/quickstart/model", "worker.teacher.model.model_path=policy", NONE,
        "data.max_response_length=10", "data.max_prompt_length=40", f"data.min_pixels={28 * 28}",
        f"data.max_pixels={2 * 28 * 28}", "worker.rollout.limit_images=2", "worker.rollout.n=1",
        "algorithm.distillation.sync=never", f"worker.actor.dynamic_batching={dynamic}", "trainer.n_gpus_per_node=1",
        "worker.rollout.tensor_parallel_size=1", "worker.actor.micro_batch_size_per_device_for_experience=1", *words,
    )  # fmt: skip
    memory = estimate(config)
    phases = {phase.name: phase.parts for phase in find_phases(config, memory)}
    assert ("teacher's log-probs" in phases) == (longer > 0)
    assert teacher_prompt(config, memory.models["actor"].tower) == 40 + longer
    if longer:
        mine, teachers = phases["log-probs"]["activations"], phases["teacher's log-probs"]["activations"]
        assert teachers * 50 == mine * (50 + longer)
        times = find_times(config, memory, read_cards("1xH100"), Assumptions())
        assert times["teacher's log-probs"] > times["log-probs"]


def test_teachers_in_the_main_process_are_counted_and_never_offloaded():
    model = "examples/quickstart/model"
    words = [f"worker.actor.model.model_path={model}", "data.max_response_length=99", NONE]
    words += ["worker.reward.reward_function=math", f"worker.teacher.sources.geo.model.model_path={model}"]
    config = config_of(*words, "worker.teacher.sources.math.model.model_path=owner/other")
    memory = estimate(config)
    assert memory.other_teachers == 2 * memory.parameters  # bf16, whole on each device; the hub's is as large
    assert estimate(config_of(*words)).other_teachers == 0
    assert memory.total - estimate(config_of(*words)).total == memory.other_teachers
    phases = find_phases(config, memory)
    assert {phase.parts.get("other teachers") for phase in phases} == {memory.other_teachers}
    kept = find_phases(config_of(*words, "worker.teacher.offload=false"), memory)
    assert {(one.parts["teacher"], one.parts["other teachers"]) for one in kept} == {
        (memory.teacher, memory.other_teachers)
    }


# --- the term in the advantages --------------------------------------------------------------------------------------


class Learner:
    """Gives the policy's log-probs, shifted, as the teacher's."""

    def __init__(self, shift):
        self.shift = shift

    def add_logprobs(self, samples, needs):
        assert set(needs) == {"teacher_logprobs"}
        return [replace(one, teacher_logprobs=one.old_logprobs + self.shift) for one in samples]


def samples():
    """Two answers [3, 4], to prompts [1, 2] of the sources math and geo."""
    mask = torch.tensor([False, False, True, True])
    return [
        Sample(
            torch.tensor([1, 2, 3, 4]), mask, torch.arange(4)[None], group_id=i, reward=0.0,
            old_logprobs=-1.0 * mask, advantages=2.0 * mask,
        )
        for i in range(2)
    ]  # fmt: skip


GROUPS = [Group(prompt_of(row=row, data_source=name), ()) for row, name in enumerate(("math", "geo"))]
MINE = TeacherModel()


@pytest.mark.parametrize(("task_reward", "expected"), [(False, 0.25), (True, 2.25)])
def test_the_teacher_adds_to_the_advantages_or_replaces_them(task_reward, expected):
    teacher = AdvantageTeacher(Teachers(Learner(0.5), lambda name: MINE), Distillation(0.5, task_reward=task_reward))
    taught = teacher.teach(samples(), GROUPS)
    assert [one.advantages.tolist() for one in taught] == [[0.0, 0.0, expected, expected]] * 2
    assert teacher.metrics(taught, [])["distillation/kl"] == -0.5


def test_a_teacher_that_is_the_policy_is_told_once(caplog):
    mine = TeacherModel()
    teacher = AdvantageTeacher(Teachers(Learner(0.0), lambda name: mine), Distillation())
    with caplog.at_level(logging.WARNING, "r1"):
        for _ in range(2):
            found = teacher.metrics(teacher.teach(samples(), GROUPS), [])
    assert json.dumps(found["distillation/kl"]) == "0.0"
    assert caplog.messages == [SAME]


def test_the_loss_reports_its_divergence():
    teacher, before = LossTeacher(), samples()
    assert teacher.teach(before, GROUPS) == before
    updates = [{"distillation_loss": 0.25}, {"distillation_loss": 0.75}]
    assert teacher.metrics(before, updates) == {"distillation/divergence": 0.5}
    assert teacher.metrics(before, []) == {}


class Silent(Canned):
    """Answers nothing to the first `times` calls."""

    def __init__(self, times, value=-0.5):
        super().__init__(value)
        self.times = times

    def read_logprobs(self, *arguments):
        found = super().read_logprobs(*arguments)
        return [[] for _ in found] if len(self.calls) <= self.times else found


def teacher_of(**models):
    found = {name: TeacherModel(reading) for name, reading in models.items()}
    return AdvantageTeacher(Teachers(Learner(0.0), found.get), Distillation())


def test_each_source_has_its_own_teacher_and_one_without_keeps_the_reward(caplog):
    both = teacher_of(math=Canned(-0.5), geo=Canned(-2.0)).teach(samples(), GROUPS)
    assert [one.advantages.tolist() for one in both] == [[0, 0, 0.5, 0.5], [0, 0, -1.0, -1.0]]
    teacher = teacher_of(math=Canned(-0.5))
    for _ in range(2):
        taught = teacher.teach(samples(), GROUPS)
    assert [one.advantages.tolist() for one in taught] == [[0, 0, 0.5, 0.5], [0, 0, 2.0, 2.0]]
    assert teacher.metrics(taught, [])["distillation/without_teacher"] == 0.5
    assert caplog.messages == ["rows of geo have no teacher: they train on the task's reward alone"]


def test_a_prompt_of_the_teachers_own_is_read_with_the_policys_answer():
    reading = Canned(-0.5)
    hinted = replace(prompt_of(), token_ids=[9] * 4, position_ids=torch.arange(4)[None])
    model = TeacherModel(reading, lambda group: hinted)
    (first, _) = AdvantageTeacher(Teachers(Learner(0.0), lambda name: model), Distillation()).teach(samples(), GROUPS)
    assert reading.calls == [[(hinted, [3, 4], 0)] * 2]
    assert first.teacher_logprobs[2:].tolist() == [-0.5, -0.5]


def test_forks_and_later_pictures_are_refused_by_name_unless_the_learner_reads_them():
    (first, second) = samples()
    forked = replace(first, token_ids=torch.tensor([1, 9, 3, 4]))
    shown = replace(second, later_inputs={"pixel_values": torch.zeros(1, 3)})
    for odd, name in ((forked, "forks"), (shown, "pictures behind the prompt")):
        with pytest.raises(RewardFailure, match=rf"rows:.*reads no {name}.*learner holds"):
            teacher_of(math=Canned(), geo=Canned()).teach([odd], GROUPS)
    teacher = AdvantageTeacher(Teachers(Learner(0.5), lambda name: MINE), Distillation())
    assert [one.advantages[2] for one in teacher.teach([forked, shown], GROUPS)] == [0.5, 0.5]


def test_rows_without_an_answer_are_asked_for_again_and_then_the_run_ends():
    reading = Silent(1)
    assert teacher_of(math=reading, geo=Canned()).teach(samples(), GROUPS)[0].advantages[2] == 0.5
    assert len(reading.calls) == 2
    with pytest.raises(RewardFailure, match=r"no log-prob of 2 of 4 tokens.*failure_share=0.1"):
        teacher_of(math=Silent(9), geo=Canned()).teach(samples(), GROUPS)


def test_up_to_the_share_of_failures_tokens_learn_nothing_and_are_counted():
    teacher = teacher_of(math=Silent(9), geo=Canned(-0.5))
    teacher.teachers.failure_share = 0.5
    taught = teacher.teach(samples(), GROUPS)
    assert [one.advantages.tolist() for one in taught] == [[0] * 4, [0, 0, 0.5, 0.5]]
    assert teacher.metrics(taught, [])["distillation/without_teacher"] == 0.5


def test_a_row_that_can_no_longer_be_shown_is_one_without_an_answer(caplog):
    def gone(group):
        raise DataError("rows.parquet:8: its picture does not decode")

    models = {"math": TeacherModel(Canned(-0.5), gone), "geo": TeacherModel(Canned(-0.5))}
    teacher = AdvantageTeacher(Teachers(Learner(0.0), models.get, failure_share=0.5), Distillation())
    taught = teacher.teach(samples(), GROUPS)
    assert [one.advantages.tolist() for one in taught] == [[0] * 4, [0, 0, 0.5, 0.5]]
    assert caplog.messages == [
        "the teacher cannot be shown a row, and perhaps more: rows.parquet:8: its picture does not decode"
    ]
    teacher.teachers.failure_share = 0.1
    with pytest.raises(RewardFailure, match="no log-prob of 2 of 4 tokens"):
        teacher.teach(samples(), GROUPS)


def test_a_step_without_samples_has_no_metrics():
    assert teacher_of(math=Canned()).metrics([], []) == {}
    assert TopTeacher(Teachers(Learner(0.0), {}.get, topk=2)).metrics([], []) == {}


# --- the teacher's most likely tokens -------------------------------------------------------------------------------


LIKELY = [[-0.5, -0.1, -3.0, 4.0, 3.0], [-0.7, -0.7, -0.9, 4.0, 1.0]]  # of two tokens: log-prob, two of them, their ids


def top_teacher(task_reward=False, failure_share=0.1, **rows):
    found = {
        name: TeacherModel(Canned(), read_top=lambda prompts, answers, row=row: [torch.tensor(row)] * len(answers))
        for name, row in rows.items()
    }
    return TopTeacher(Teachers(Learner(0.0), found.get, failure_share=failure_share, topk=2), task_reward)


@pytest.mark.parametrize("task_reward", [False, True])
def test_likely_tokens_go_to_the_loss_and_replace_the_tasks_advantages(task_reward):
    teacher = top_teacher(task_reward, math=LIKELY)
    first, second = teacher.teach(samples(), GROUPS)
    assert first.teacher_logprobs[2:].tolist() == pytest.approx([-0.5, -0.7])
    assert first.teacher_top[2:].tolist() == [pytest.approx([-0.1, -3.0]), pytest.approx([-0.7, -0.9])]
    assert first.teacher_top_ids[2:].tolist() == [[4, 3], [4, 1]]
    assert first.advantages.tolist() == (samples()[0].advantages.tolist() if task_reward else [0.0] * 4)
    assert second.advantages.tolist() == [0, 0, 2, 2]  # of a source without a teacher
    assert second.teacher_top.isnan().all()
    found = teacher.metrics([first, second], [{"distillation_loss": 0.5}])
    assert found == {"distillation/without_teacher": 0.5, "distillation/divergence": 0.5}


def test_a_teacher_that_lists_what_the_policy_does_is_told(caplog):
    teacher = top_teacher(math=LIKELY, geo=LIKELY)
    taught = teacher.teach(samples(), GROUPS)
    assert teacher.metrics(taught, [{"distillation_loss": 0.0}])["distillation/divergence"] == 0
    assert caplog.messages == [SAME]


def test_answers_without_likely_tokens_are_counted_and_end_the_run_above_the_share():
    with pytest.raises(RewardFailure, match="no log-prob of 2 of 4 tokens"):
        top_teacher(math=[], geo=LIKELY).teach(samples(), GROUPS)
    first, _ = top_teacher(failure_share=0.5, math=[], geo=LIKELY).teach(samples(), GROUPS)
    assert first.teacher_top.isnan().all()
    assert first.teacher_top_ids.eq(-1).all()


def test_a_run_compares_with_likely_tokens_and_says_so():
    words = ["algorithm.distillation.form=loss", "algorithm.distillation.divergence=forward_kl"]
    words += ["algorithm.distillation.topk=32", "worker.teacher.urls=http://a:1", NONE, "worker.rollout.n=1"]
    config = config_of(*words)
    update = build_update(config, updates_per_step=1)
    assert (update.objective.divergence, update.needs) == ("top", frozenset())
    assert describe_distillation(config).startswith("distillation: 1 · forward_kl over the teacher's 32 most likely")


# --- prompts of the teacher's own ------------------------------------------------------------------------------------


def example_of(content):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    return Example("rows:7", messages, (), "42", metadata={"hint": "h"})


def hint(content, answer, hint, **columns):
    return f"{content} ({hint}: {answer})"


def test_a_context_rewrites_the_text_and_leaves_the_pictures():
    assert rewrite_prompt(hint, example_of("6*7?")).messages[1]["content"] == "6*7? (h: 42)"
    parts = [{"type": "image"}, {"type": "text", "text": "6*7?"}]
    rewritten = rewrite_prompt(hint, example_of(parts))
    assert rewritten.messages[1]["content"] == [{"type": "image"}, {"type": "text", "text": "6*7? (h: 42)"}]
    assert rewritten.messages[0] == {"role": "system", "content": "s"}


def test_a_context_may_stand_before_the_whole_prompt():
    told, asked = put_before(hint, example_of("6*7?")).messages
    assert told == {"role": "system", "content": "6*7? (h: 42)\n\ns"}
    assert asked == {"role": "user", "content": "6*7?"}
    parts = [{"type": "image"}, {"type": "text", "text": "6*7?"}]
    alone = replace(example_of(parts), messages=[{"role": "user", "content": parts}])
    assert put_before(hint, alone).messages == [{"role": "system", "content": "6*7? (h: 42)"}, *alone.messages]


def test_a_context_that_cannot_be_applied_names_the_row():
    with pytest.raises(DataError, match=r"rows:7: the teacher's context fails.*missing"):
        rewrite_prompt(lambda **columns: columns["missing"], example_of("x"))
    with pytest.raises(DataError, match="rows:7: the prompt has no user message"):
        rewrite_prompt(hint, replace(example_of("x"), messages=[{"role": "system", "content": "s"}]))


@pytest.mark.parametrize(
    ("sync", "syncs", "copies"),
    [("1", (1, 0.0), 0), ("5", (5, 0.0), 4), ("never", (0, 0.0), 4), ("ema:0.01", (0, 0.01), 4)],
)
def test_a_policy_that_teaches_itself_takes_the_learners_place_and_its_copy_is_counted(sync, syncs, copies):
    model = "examples/quickstart/model"
    words = [f"worker.actor.model.model_path={model}", "worker.teacher.model.model_path=policy", "worker.rollout.n=1"]
    words += ["worker.teacher.sources.geo.model.model_path=owner/other", "worker.teacher.max_pixels=9999999"]
    words += ["worker.actor.fsdp.torch_dtype=fp32", "data.max_response_length=99"]
    config = config_of(*words, NONE, f"algorithm.distillation.sync={sync}")
    assert config.worker.teacher.in_learner is None
    assert config.algorithm.distillation.syncs == syncs
    memory = estimate(config)
    assert memory.teacher == copies * memory.trained // 8


def test_a_policy_with_its_weights_of_the_step_needs_a_prompt_of_its_own():
    itself = "worker.teacher.model.model_path=policy"
    config_of(itself, NONE, "worker.rollout.n=1", "algorithm.distillation.sync=ema:0.01")
    with pytest.raises(ConfigError, match=r"or other weights: algorithm\.distillation\.sync"):
        config_of(itself, NONE, "worker.rollout.n=1")


def test_teachers_by_source_are_read_from_the_configuration():
    config = config_of(
        NONE, "worker.teacher.sources.geo.urls=http://a:1", "worker.teacher.sources.math.model.model_path=owner/t",
        "worker.reward.reward_function=math",
    )  # fmt: skip
    teacher = config.worker.teacher
    assert teacher.of("geo").urls == "http://a:1"
    assert (teacher.of("other"), teacher.in_learner) == (None, "owner/t")
    assert config.learns_task
    with pytest.raises(ConfigError, match="temperature 1"):
        config_of(NONE, "worker.teacher.urls=http://a:1", "worker.rollout.temperature=0.7", "worker.rollout.n=1")


@pytest.mark.slow
def test_a_run_without_a_teacher_imports_nothing_of_one():
    modules = ("r1_cli.jobs.train", "r1_cli.build.learner", "r1_cli.build.profiling", "r1_cli.train.loop")
    of_teachers = ("r1_cli.train.teaching", "r1_cli.build.teacher", "r1_cli.build.teacher_prompts")
    code = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; print([*sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'r1_cli.train.loop'" in loaded
    assert not [name for name in of_teachers if f"'{name}'" in loaded]
