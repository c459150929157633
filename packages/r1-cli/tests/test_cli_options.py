"""Every setting of every estimator and loss has a key, the key reaches it, and the README lists it."""

import re
import subprocess
import sys
from dataclasses import fields, replace
from functools import reduce
from math import inf
from operator import getitem
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from cli_options_table import EXAMPLE, README, wrong_lines, wrong_rows

from r1_cli.build.algorithm import (
    build_advantages,
    build_correction,
    build_objective,
    build_shaping,
    gather_needs,
    try_algorithm,
)
from r1_cli.config import ConfigError, RunConfig, load_config, printable
from r1_cli.config.actor import ActorConfig
from r1_cli.config.options import (
    ESTIMATOR_OPTIONS,
    LOSS_OPTIONS,
    SHARED,
    Option,
    find_options,
    refuse_clashes,
    settings_of,
)
from r1_core import registry
from r1_core.losses import POLICY_LOSSES, Correction, Rejection
from r1_core.registry import Setting

BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]
ROOT = Path(__file__).parents[3]
PAIRS = [(option, owner) for option in (*ESTIMATOR_OPTIONS, *LOSS_OPTIONS) for owner in option.owners]


def config_of(*words: str) -> RunConfig:
    return load_config([*BASE, *words])[0]


NEEDS = {"algorithm.gdpo_reward_weights": ("algorithm.gdpo_reward_keys=[accuracy,format]",)}


def another(setting: Setting) -> Any:
    """A value within the setting's range that is not its default."""
    given = {"reward_clip": (-2.0, 3.0), "reward_keys": ("a", "b"), "reward_weights": (0.5, 2.0), "clip_dual": 7.0}
    if setting.name in given:
        return given[setting.name]
    if isinstance(setting.default, bool):
        return not setting.default
    words = [word for word in get_args(setting.type) if get_origin(setting.type) is Literal and word != setting.default]
    return words[0] if words else setting.default * 0.7


def test_the_registry_is_read_without_torch_and_holds_what_the_classes_have() -> None:
    code = "import sys; from r1_core import registry as c; c.estimators(), c.losses(); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
    for entry in {*registry.estimators().values(), *registry.losses().values()}:
        loaded, settings = entry.load(), entry.settings
        assert (tuple(loaded.names), tuple(loaded.needs)) == (entry.names, entry.needs)
        assert [(field.name, field.default) for field in fields(loaded)] == [
            (s.name, s.default) for s in entry.settings
        ]
        assert [field.type for field in fields(loaded)] == [setting.type for setting in settings]
    for name, entry in registry.losses().items():
        loss = POLICY_LOSSES.get(name)
        assert (loss.token_wise, loss.aggregation) == (entry.token_wise, entry.aggregation)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("option", "owner"), PAIRS, ids=lambda value: getattr(value, "key", value))
def test_a_key_reaches_its_owner(option: Option, owner: str) -> None:
    value = another(option.owners[owner])
    word = f"{option.key}={list(value) if isinstance(value, tuple) else value}"
    choice = f"algorithm.adv_estimator={owner}" if option in ESTIMATOR_OPTIONS else f"worker.actor.loss_type={owner}"
    config = config_of(choice, word, *NEEDS.get(option.key, ()))
    built = build_advantages(config).estimator, build_objective(config).policy_loss
    assert getattr(built[option in LOSS_OPTIONS], option.setting) == value != option.owners[owner].default


@pytest.mark.parametrize(("option", "owner"), PAIRS, ids=lambda value: getattr(value, "key", value))
def test_a_value_is_shown_as_it_is_used(option: Option, owner: str) -> None:
    choice = f"algorithm.adv_estimator={owner}" if option in ESTIMATOR_OPTIONS else f"worker.actor.loss_type={owner}"
    config = config_of(choice)
    built = build_advantages(config).estimator, build_objective(config).policy_loss
    used = getattr(built[option in LOSS_OPTIONS], option.setting)
    section, _, leaf = option.key.rpartition(".")
    shown = reduce(getitem, section.split("."), printable(config))[leaf]
    assert shown == (None if used == inf else used)


def test_what_the_user_does_not_set_is_the_owners_own() -> None:
    gspo = "worker.actor.loss_type=gspo"
    objective = build_objective(config_of(gspo))
    assert objective.policy_loss == POLICY_LOSSES.get("gspo")()
    assert objective.aggregation == "seq"
    assert build_objective(config_of(gspo, "worker.actor.loss_avg_mode=token")).aggregation == "token"
    assert settings_of(config_of("algorithm.adv_eps=null").algorithm, ESTIMATOR_OPTIONS, "grpo") == {}


def test_the_example_file_leaves_each_loss_its_own_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    for name in registry.losses():
        config, _ = load_config([str(EXAMPLE), f"worker.actor.loss_type={name}"])
        assert build_objective(config).policy_loss == POLICY_LOSSES.get(name)()


def test_keys_that_clash_are_refused() -> None:
    sapo = registry.losses()["sapo"]

    def named(name: str, setting: str) -> registry.Entry:
        return replace(sapo, names=(name,), settings=(replace(sapo.settings[0], name=setting),))

    with pytest.raises(ValueError, match=r"key worker.actor.a_b_c of its setting 'b_c' is taken; rename it"):
        find_options("worker.actor", {"a_b": named("a_b", "c"), "a": named("a", "b_c")})
    for clash in (("loss", "type"), ("ppo", "epochs")):
        with pytest.raises(ValueError, match=f"{clash[0]}_{clash[1]} is a key of every run; rename the setting"):
            refuse_clashes(ActorConfig, find_options("worker.actor", {clash[0]: named(*clash)}))


OWN = """
def modest(inputs): ...
modest.needs = ("groups",)

class Careful:
    needs = ["squared_probs"]
    def __call__(self, inputs): ...

def wrong(inputs): ...
wrong.needs = ("baseline",)
"""


def test_an_estimator_of_ones_own_says_what_it_needs_without_being_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)

    def needs(name: str) -> frozenset[str]:
        config = config_of("algorithm.disable_kl=true", f"algorithm.adv_estimator=mine.py:{name}")
        return gather_needs(build_advantages(config), build_objective(config), updates_per_step=1)

    assert needs("modest") == {"groups"}
    assert needs("Careful") == {"squared_probs", "old_logprobs"}
    with pytest.raises(ConfigError, match=r"adv_estimator=mine.py:modest compares the answers to one prompt"):
        config_of("algorithm.adv_estimator=mine.py:modest", "worker.rollout.n=1")
    with pytest.raises(ConfigError, match=r"mine.py:wrong needs 'baseline', which .*; did you mean 'baselines'\?"):
        config_of("algorithm.adv_estimator=mine.py:wrong")


def test_the_readmes_own_estimator_and_loss_are_what_they_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    Path("mine.py").write_text(shown)
    config = config_of("algorithm.adv_estimator=mine.py:estimator", "worker.actor.loss_type=mine.py:loss")
    try_algorithm(config)
    assert build_objective(config).token_wise
    Path("mine.py").write_text(shown + "loss.needs = ['ref_logprobs']\n")
    with pytest.raises(ConfigError, match=r"loss_type=mine.py:loss needs the reference: set false"):
        config_of("worker.actor.loss_type=mine.py:loss", "algorithm.disable_kl=true")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module\n", r"mine.py:1 cannot be run: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(inputs):\n    return 3\n", "mine.py:f gave int 3; "),
        ("if False:\n    def f(inputs): ...\n", "mine.py defines no f"),
    ],
)
def test_a_file_of_ones_own_that_does_not_do_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(text + "f = None\n" * text.startswith("import"))
    config = config_of("algorithm.adv_estimator=mine.py:f", "worker.actor.loss_type=mine.py:f")
    with pytest.raises(ConfigError) as caught:
        try_algorithm(config)
    assert [problem.key for problem in caught.value.problems] == ["algorithm.adv_estimator", "worker.actor.loss_type"]
    assert message in str(caught.value)


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", None),
        ("rollout_is=token", Correction("token", upper=2.0)),
        ("rollout_is=sequence rollout_is_threshold=5", Correction("sequence", upper=5.0)),
        ("rollout_is=geometric rollout_is_threshold=0.5_3", Correction("geometric", 3.0, 0.5, "zero")),
        ("rollout_is=token rollout_is_batch_normalize=true", Correction("token", upper=2.0, normalize=True)),
        (
            "rollout_rs=token_k1 rollout_rs_threshold=2",
            Correction(None, rejections=(Rejection("k1", "token", 2.0, 0.5),)),
        ),
        (
            "rollout_rs=geometric,seq_sum_k1,seq_max_k3 rollout_rs_threshold=0.9_1.1,4,0.1",
            Correction(
                None,
                rejections=(
                    Rejection("k1", "mean", 1.1, 0.9),
                    Rejection("k1", "sum", 4.0, 0.25),
                    Rejection("k3", "max", 0.1),
                ),
            ),
        ),
        (
            "rollout_rs=token_k2,seq_mean_k2 rollout_rs_threshold=0.3",
            Correction(None, rejections=(Rejection("k2", "token", 0.3), Rejection("k2", "mean", 0.3))),
        ),
    ],
)
def test_a_correction_is_what_its_keys_say(words: str, expected: Correction | None) -> None:
    assert build_correction(config_of(*(f"{CORRECTION}.{word}" for word in words.split()))) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainer.max_staleness=0", None),
        ("trainer.max_staleness=1", Correction("token", upper=2.0)),
        (f"trainer.max_staleness=1 {CORRECTION}.rollout_is_threshold=3", Correction("token", upper=3.0)),
        (f"trainer.max_staleness=1 {CORRECTION}.rollout_is=null", None),
        (f"trainer.max_staleness=1 {CORRECTION}.rollout_is=sequence", Correction("sequence", upper=2.0)),
        ("algorithm.online_filtering=true", Correction("token", upper=2.0)),
        ("algorithm.online_filtering=true algorithm.surplus_max_age=0", None),
        (f"algorithm.online_filtering=true {CORRECTION}.rollout_is=null", None),
    ],
)
def test_stale_samples_are_corrected_by_token_unless_the_user_says_otherwise(
    words: str, expected: Correction | None
) -> None:
    config = config_of(*words.split())
    objective = build_objective(config)
    assert objective.correction == build_advantages(config).correction == expected
    assert ("old_logprobs" in objective.needs) is (expected is not None)
    assert printable(config)["algorithm"]["rollout_correction"]["rollout_is"] == (expected and expected.level)


def test_an_objective_takes_the_length_and_the_threshold() -> None:
    objective = build_objective(config_of())
    assert (objective.length, objective.off_policy_threshold) == (2048, float("inf"))
    objective = build_objective(
        config_of("worker.actor.loss_scale_factor=9", "algorithm.off_policy_mask_threshold=0.5")
    )
    assert (objective.length, objective.off_policy_threshold) == (9, 0.5)


@pytest.mark.parametrize(
    ("words", "later"),
    [
        ("algorithm.disable_kl=true", True),
        ("algorithm.disable_kl=false algorithm.use_kl_loss=true", True),
        ("algorithm.disable_kl=false algorithm.use_kl_loss=false", False),
        ("algorithm.disable_kl=true algorithm.adv_estimator=optimal_token_baseline", False),
        ("algorithm.disable_kl=true algorithm.adv_estimator=mine.py:estimate", False),
        ("algorithm.disable_kl=true algorithm.rollout_correction.rollout_is=token", False),
        ("algorithm.disable_kl=true worker.actor.loss_type=clip_cov", False),
        ("algorithm.disable_kl=true worker.actor.loss_type=gspo", True),
        ("algorithm.disable_kl=true algorithm.off_policy_mask_threshold=0.5", True),
    ],
)
def test_old_log_probs_are_taken_early_only_where_something_asks_for_them(
    words: str, later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def estimate(inputs): ...\n")
    config = config_of(*words.split())
    estimate, objective = build_advantages(config), build_objective(config)
    assert ("old_logprobs" not in gather_needs(estimate, objective, updates_per_step=1)) is later
    assert "old_logprobs" in gather_needs(estimate, objective, updates_per_step=2)


def test_the_one_estimator_that_clips_after_its_baseline_is_given_unclipped_rewards() -> None:
    words = "algorithm.reward_clip_range=[-1,1]", "algorithm.adv_estimator="
    assert build_shaping(config_of(words[0])).clip == (-1.0, 1.0)
    assert build_shaping(config_of(words[0], words[1] + "reinforce_baseline")).clip is None


def test_the_readme_and_the_example_say_nothing_of_settings_that_the_code_does_not() -> None:
    assert wrong_rows(README.read_text(encoding="utf-8")) == [], "run python tests/write_tables.py"
    assert wrong_lines(EXAMPLE.read_text(encoding="utf-8")) == [], "run python tests/write_tables.py"


@pytest.mark.parametrize("section", SHARED)
def test_a_setting_that_shares_a_key_leads_to_it_and_is_documented(section: str) -> None:
    for setting, (leaf, _) in SHARED[section].items():
        with pytest.raises(ConfigError, match=rf"did you mean {section}\.{leaf}\?"):
            config_of(f"{section}.leave_two_out_{setting}=1")
        for page in ("CONTRIBUTING.md", "docs/own-loss-or-estimator.md"):
            assert f"`{setting}`" in (ROOT / page).read_text("utf-8"), page
