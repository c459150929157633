"""Reading values: forms, precedence, provenance, mistakes, and the names of earlier releases."""

import json
from pathlib import Path

import pytest

from r1_cli.config import ConfigError, Problem, Provenance, RunConfig, load_config, lookup, printable
from r1_cli.config.sources import validation_sources
from r1_cli.runs.manifest import hide_secrets

BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]


def load(*words: str) -> tuple[RunConfig, Provenance]:
    return load_config([*BASE, *words])


def message_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*words)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data:\n  seed: 7\n  rollout_batch_size: 256\n"
        "worker:\n  rollout:\n    val_override_config: {temperature: 0.5}\n"
        "  reward:\n    reward_function: math\n"
        "  actor:\n    model:\n      override_config:\n        a: 1\n        b: 2\n"
        "trainer:\n  experiment_name: 007\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("worker.actor.optim.lr=1e-6", 1e-6),
        ("worker.actor.optim.lr=3e-4", 3e-4),
        ("worker.actor.optim.lr=1.0e-6", 1e-6),
        ("worker.actor.optim.lr=1E-6", 1e-6),
        ("worker.actor.optim.lr=.5", 0.5),
        ("worker.actor.optim.lr=0", 0.0),
        ("worker.actor.optim.betas=[0.9,0.95]", (0.9, 0.95)),
        ("algorithm.disable_kl=True", True),
        ("algorithm.disable_kl=true", True),
        ("data.shuffle=False", False),
        ("data.min_pixels=None", None),
        ("data.min_pixels=null", None),
        ("data.min_pixels=", None),
        ("data.rollout_batch_size=1_024", 1024),
        ("data.train_files=[a/b@train,c/d@train]", ["a/b@train", "c/d@train"]),
        ("trainer.logger=[console,swanlab]", ["console", "swanlab"]),
        ("trainer.logger='[\"console\"]'", None),
        ("trainer.logger=wandb", ["wandb"]),
        ("trainer.experiment_name=007", "007"),
        ("trainer.experiment_name=1e5", "1e5"),
        ("trainer.experiment_name=2026-01-31", "2026-01-31"),
        ("trainer.experiment_name=12:30", "12:30"),
        ("trainer.experiment_name=yes", "yes"),
        ("trainer.experiment_name='a b'", "a b"),
        ("trainer.experiment_name=a=b", "a=b"),
        ("data.system_prompt=Think: then # answer", "Think: then # answer"),
        ("worker.rollout.dtype=bfloat16", "bf16"),
        ("worker.actor.fsdp.torch_dtype=float32", "fp32"),
        ("algorithm.reward_clip_range=[-10,10]", (-10, 10)),
        ("algorithm.rollout_correction.rollout_is_threshold=2", 2.0),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5_5.0", "0.5_5.0"),
        ("algorithm.rollout_correction.rollout_rs_threshold=0_2.0,1e-2", ["0_2.0", 0.01]),
        ("algorithm.rollout_correction.rollout_rs_threshold=[2, 0.5_2.0]", [2.0, "0.5_2.0"]),
    ],
)
def test_a_value_is_read_as_it_was_meant(word: str, value: object) -> None:
    key = word.partition("=")[0]
    if value is None and "min_pixels" not in key:
        assert "must be one of" in message_of(word)
    else:
        assert lookup(load(word)[0], key) == value


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(file: Path) -> None:
    config, provenance = load(f"config={file}", "data.seed=8")
    assert (config.data.seed, config.data.rollout_batch_size, config.data.val_batch_size) == (8, 256, 1024)
    assert provenance.origins["data.seed"] == "command line"
    assert provenance.origins["data.rollout_batch_size"] == f"{file}:3"
    assert "data.val_batch_size" not in provenance.origins
    assert provenance.is_set("data.seed")
    assert provenance.is_set("worker.rollout")
    assert not provenance.is_set("worker.critic")


def test_a_later_word_wins_over_an_earlier_one() -> None:
    assert load("data.seed=1", "data.seed=2")[0].data.seed == 2


def test_mappings_merge_key_by_key(file: Path) -> None:
    config, _ = load(str(file), 'worker.rollout.val_override_config={"n":16}', "worker.actor.model.override_config.b=3")
    validation = config.worker.rollout.val_override_config
    assert (validation.n, validation.temperature, validation.top_p) == (16, 0.5, 0.95)
    assert config.worker.actor.model.override_config == {"a": 1, "b": 3}


def test_null_empties_an_open_mapping(file: Path) -> None:
    assert load(str(file), "worker.actor.model.override_config=null")[0].worker.actor.model.override_config == {}


def test_a_file_keeps_the_text_of_text_values(file: Path) -> None:
    assert load(str(file))[0].trainer.experiment_name == "007"


def test_an_empty_section_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer:\ndata: {}\n", encoding="utf-8")
    assert load(str(path))[0].trainer == RunConfig().trainer


def test_a_plus_adds_to_an_open_mapping_only(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(reward_inputs, x): ...\n", encoding="utf-8")
    spec = f"worker.reward.reward_function={reward}:compute_score"
    config, _ = load(spec, "+worker.reward.reward_function_kwargs.x=1e-3")
    assert config.worker.reward.reward_function_kwargs == {"x": 1e-3}
    assert "open mapping only; write data.seed=… without it" in message_of("+data.seed=1")
    assert "open mapping only" in message_of("+data.sede=1")


def test_a_reward_file_alone_means_its_function_main(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def main(reward_inputs): ...\n", encoding="utf-8")
    config, _ = load(f"worker.reward.reward_function={reward}")
    assert config.worker.reward.reward_function == f"{reward}:main"


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("worker.rollout.lr=1", "worker.actor.optim.lr"),
        ("lr=1", "worker.actor.optim.lr"),
        ("data.sede=1", "data.seed"),
        ("trainer.total_epoch=1", "trainer.total_epochs"),
        ("worker.actor.global_batchsize=1", "worker.actor.global_batch_size"),
        ("actor.global_batch_size=1", "worker.actor.global_batch_size"),
        ("worker.rollout.val_override_config.temprature=1", "worker.rollout.val_override_config.temperature"),
        ("worker.actor.lora.rank=1", "worker.actor.model.lora.rank"),
        ("algorithm.clip_ratio_low=1", "worker.actor.clip_ratio_low"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(word: str, near: str) -> None:
    text = message_of(word)
    assert f"{word} (command line): unknown key; did you mean {near}?" in text


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rate", "worker.actor.optim.lr"),
        ("trainer.learning_rate", "worker.actor.optim.lr"),
        ("num_generations", "worker.rollout.n"),
        ("temprature", "worker.rollout.temperature"),
        ("worker.actor.lr", "worker.actor.optim.lr"),
        ("foo", None),
    ],
)
def test_the_key_that_was_meant_is_named_and_none_that_was_not(typed: str, meant: str | None) -> None:
    text = message_of(f"{typed}=1")
    assert (f"did you mean {meant}?" in text) if meant else ("did you mean" not in text)


def test_a_key_like_nothing_else_points_to_the_list() -> None:
    assert "unknown key; see examples/config.yaml" in message_of("zzzzzz.qqqqqq=1")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.seed=one", "must be a whole number"),
        ("data.seed=1.5", "must be a whole number"),
        ("data.seed=true", "must be a whole number"),
        ("data.shuffle=1", "must be true or false"),
        ("data.min_pixels=many", "must be a whole number or null"),
        ("data.rollout_batch_size=0", "must be at least 1"),
        ("worker.actor.optim.lr=fast", "must be a number"),
        ("worker.actor.optim.lr=-1", "must be at least 0"),
        ("worker.actor.optim.lr=.nan", "must be a finite number"),
        ("worker.actor.clip_ratio_dual=1.0", "must be more than 1"),
        ("worker.rollout.top_p=1.5", "must be at most 1"),
        ("trainer.logger=[wandbb]", "did you mean wandb?"),
        ("trainer.logger=[]", "at least 1 item"),
        ("algorithm.adv_estimator=GRPO2", "did you mean grpo?"),
        ("algorithm.kl_penalty=k9", "must be one of kl, abs, mse, low_var_kl, full"),
        ("worker.actor.loss_type=gpso", "did you mean gspo?"),
        ("worker.actor=3", "is a section; set a key inside it"),
        ("data.seed.x=3", "data.seed is a single value"),
        ("data.train_files=[1,2]", "must be text"),
        ("trainer.save_checkpoint_path=runs/${trainer.project_name}", "write the value itself"),
    ],
)
def test_a_wrong_value_says_what_is_wanted(word: str, message: str) -> None:
    text = message_of(word)
    assert f"{word} (command line): " in text
    assert message in text


def test_all_problems_come_in_one_message_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data:\n  seed: x\n  seeed: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(str(path), "trainer.max_steps=0")
    assert len(caught.value.problems) == 3
    assert f"data.seed=x ({path}:2)" in str(caught.value)
    assert f"data.seeed=2 ({path}:3)" in str(caught.value)
    assert "trainer.max_steps=0 (command line)" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  seed: 1\n  seed: 2\n", "data.seed (FILE:3): given twice, first on line 2"),
        ("data: [1\n", "FILE:2"),
        ("- 1\n", "the file must hold sections"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    assert message.replace("FILE", str(path)) in message_of(str(path))


def test_a_missing_file_names_a_near_one(file: Path) -> None:
    assert f"did you mean {file}?" in message_of(f"config={file.parent / 'runs.yaml'}")


def test_secrets_in_free_form_options_are_masked(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def f(reward_inputs, **kwargs): ...\n", encoding="utf-8")
    kwargs = "worker.reward.reward_function_kwargs"
    config, _ = load(f"worker.reward.reward_function={reward}:f", f"{kwargs}.judge.api_key=abc", f"{kwargs}.weight=2")
    shown = printable(config)["worker"]["reward"]["reward_function_kwargs"]
    assert shown == {"judge": {"api_key": "***"}, "weight": 2}
    assert printable(config)["data"]["prompt_key"] == "prompt"


def test_a_masked_secret_is_asked_for_by_name_and_never_used(tmp_path: Path) -> None:
    reward, saved = tmp_path / "reward.py", tmp_path / "experiment_config.json"
    reward.write_text("def f(reward_inputs, **kwargs): ...\n", encoding="utf-8")
    kwargs = "worker.reward.reward_function_kwargs"
    config, _ = load(
        f"worker.reward.reward_function={reward}:f",
        f"{kwargs}.judges=[{{api_key: abc}}]",
        f"{kwargs}.token=x",
        "data.val_files=owner/rows@test",
    )
    saved.write_text(json.dumps(printable(config)))
    assert "abc" not in saved.read_text()
    with pytest.raises(ConfigError) as caught:
        load_config([f"config={saved}"], command="eval")
    assert [problem.key for problem in caught.value.problems] == [f"{kwargs}.judges[0].api_key", f"{kwargs}.token"]
    assert f"give it again, as +{kwargs}.token=…" in str(caught.value)
    again = [f"+{kwargs}.token=s3cret", f"+{kwargs}.judges=[{{api_key: abc}}]"]
    config, _ = load_config([f"config={saved}", *again], command="eval")
    assert config.worker.reward.reward_function_kwargs == {"judges": [{"api_key": "abc"}], "token": "s3cret"}
    load_config([f"config={saved}"], command="data")  # which asks no judge
    with pytest.raises(ConfigError, match="takes no 'judges'") as caught:
        load_config([f"config={saved}", *again, "worker.reward.reward_function=gsm8k"])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("trainer.total_episodes=3", {"trainer.total_epochs": 3}),
        ("trainer.remove_previous_ckpt=true", {"trainer.save_limit": 1}),
        ("trainer.remove_previous_ckpt=false", {"trainer.save_limit": -1}),
        ("trainer.remove_ckpt_after_load=true", {}),
        ("trainer.val_generations_to_log_to_wandb=4", {"trainer.val_generations_to_log": 4}),
        ("trainer.test_freq=7", {"trainer.val_freq": 7}),
        ("worker.actor.ulysses_sequence_parallel_size=2", {"worker.actor.ulysses_size": 2}),
        ("worker.actor.use_kl_loss=false", {"algorithm.use_kl_loss": False}),
        ("worker.actor.kl_loss_coef=0.5", {"algorithm.kl_coef": 0.5}),
        ("worker.actor.kl_loss_type=mse", {"algorithm.kl_penalty": "mse"}),
        ("worker.actor.entropy_coeff=1e-3", {"worker.actor.entropy_coef": 1e-3}),
        ("worker.actor.clip_ratio=0.1", {"worker.actor.clip_ratio_low": 0.1, "worker.actor.clip_ratio_high": 0.1}),
        ("worker.actor.offload.param_offload=false", {"worker.actor.offload.offload_params": False}),
        ("worker.ref.offload.param_offload=true", {"worker.ref.offload.offload_params": True}),
        ("worker.reward.compute_score=r1v", {"worker.reward.reward_function": "r1v"}),
        ("worker.reward.score_function=gsm8k", {"worker.reward.reward_function": "gsm8k"}),
        ("worker.reward.reward_type=function", {"worker.reward.reward_type": None}),
        ("worker.reward.reward_type=batch", {"worker.reward.reward_type": "batch"}),
        ("data.train_batch_size=1024", {"data.rollout_batch_size": 1024}),
        ("data.system_prompt=Think", {"data.system_prompt": "Think"}),
        ("algorithm.kl_ctrl.kl_coef=0.3", {"algorithm.kl_coef": 0.3}),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", {"worker.actor.global_batch_size": 64}),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=4", {"worker.rollout.tensor_parallel_size": 4}),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=true", {"worker.ref.offload.offload_params": True}),
        ("actor_rollout_ref.model.use_remove_padding=false", {"worker.actor.padding_free": False}),
        ("critic.optim.lr=1e-5", {"worker.critic.optim.lr": 1e-5}),
        ("trainer.resume_mode=disable", {"trainer.find_last_checkpoint": False}),
        ("algorithm.norm_adv_by_std_in_grpo=false", {"algorithm.norm_adv_by_std": False}),
        ("algorithm.filter_target=reward_std", {"algorithm.filter_mode": "default"}),
        ("actor_rollout_ref.actor.policy_loss.clip_cov_ub=4.0", {"worker.actor.clip_cov_ub": 4.0}),
        (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            {"worker.actor.loss_avg_mode": "seq-mean-token-sum"},
        ),
        ("actor_rollout_ref.actor.clip_ratio_c=10", {"worker.actor.clip_ratio_dual": 10}),
        ("reward_model.overlong_buffer.penalty_factor=0.5", {"worker.reward.overlong_buffer.penalty_factor": 0.5}),
        (
            "algorithm.adv_estimator=reinforce",
            {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.adv_unbiased_std": False},
        ),
        (
            "algorithm.adv_estimator=group_norm",
            {
                "algorithm.adv_estimator": "reinforce_baseline",
                "algorithm.adv_baseline": "group_norm",
                "algorithm.adv_whiten": False,
            },
        ),
    ],
)
def test_a_name_of_an_earlier_release_works_with_one_notice(old: str, today: dict[str, object]) -> None:
    base = [word for word in BASE if "reward_function" not in word or "score" not in old]
    config, provenance = load_config([*base, old])
    assert {key: lookup(config, key) for key in today} == today
    assert len(provenance.notices) == 1
    assert provenance.notices[0].startswith(f"command line: {old.partition('=')[0]} ")


def test_the_kl_loss_of_early_files_wins_over_their_kl_in_the_reward(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        "algorithm: {kl_coef: 0.0}\nworker:\n  actor: {use_kl_loss: true, kl_loss_coef: 1.0e-2, kl_loss_type: mse}\n",
        encoding="utf-8",
    )
    config, _ = load(str(path))
    assert (config.algorithm.use_kl_loss, config.algorithm.kl_coef, config.algorithm.kl_penalty) == (True, 1e-2, "mse")
    config, _ = load(str(path), "worker.actor.kl_loss_coef=0.5")
    assert config.algorithm.kl_coef == 0.5


def test_a_kl_loss_that_early_files_switch_off_leaves_the_kl_in_the_reward_alone() -> None:
    config, provenance = load(
        "worker.actor.use_kl_loss=false", "worker.actor.kl_loss_coef=0.5", "algorithm.kl_coef=0.2"
    )
    assert config.algorithm.kl_coef == 0.2
    assert any("ignored, because use_kl_loss is false" in notice for notice in provenance.notices)


def test_an_old_word_wins_over_the_file_and_todays_word_over_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {total_epochs: 15}\n", encoding="utf-8")
    assert load(str(path), "trainer.total_episodes=3")[0].trainer.total_epochs == 3
    config, provenance = load("trainer.total_episodes=3", "trainer.total_epochs=4")
    assert config.trainer.total_epochs == 4
    assert "is ignored, because trainer.total_epochs is given too" in provenance.notices[-1]


def test_dapo_is_grpo_with_its_settings_unless_the_same_layer_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {adv_estimator: grpo, online_filtering: false, disable_kl: false}\n", encoding="utf-8")
    config, _ = load(str(path), "algorithm.adv_estimator=dapo", "worker.actor.clip_ratio_high=0.25")
    assert (config.algorithm.adv_estimator, config.algorithm.online_filtering) == ("grpo", True)
    assert (config.algorithm.disable_kl, config.worker.actor.clip_ratio_high) == (True, 0.25)


def test_example_files_that_moved_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples" / "reward_function").mkdir(parents=True)
    (tmp_path / "examples" / "reward_function" / "math.py").write_text("def compute_score(x): ...\n", encoding="utf-8")
    config, _ = load_config([*BASE[:2], "worker.reward.score_function=./examples/score_function/math.py:compute_score"])
    assert config.worker.reward.reward_function == "./examples/reward_function/math.py:compute_score"


@pytest.mark.parametrize(
    ("rules", "canonical"),
    [
        ("token_k1", ["token_k1"]),
        ("geometric,seq_max_k2", ["seq_mean_k1", "seq_max_k2"]),
        ("[token, sequence]", ["token_k1", "seq_sum_k1"]),
        ("null", None),
    ],
)
def test_rejections_are_one_or_several_and_older_names_are_known(rules: str, canonical: object) -> None:
    section = "algorithm.rollout_correction"
    config, _ = load(f"{section}.rollout_rs={rules}", f"{section}.rollout_rs_threshold=2.0")
    assert config.algorithm.rollout_correction.rollout_rs == canonical


@pytest.mark.parametrize("value", ["-1", "0", "5_2", "high", "1_2_3", "true"])
@pytest.mark.parametrize("key", ["rollout_is_threshold", "rollout_rs_threshold"])
def test_a_threshold_that_bounds_nothing_says_what_it_may_be(key: str, value: str) -> None:
    text = message_of(f"algorithm.rollout_correction.{key}={value}")
    assert f"algorithm.rollout_correction.{key}={value}" in text
    assert "must be an upper bound above 0 such as 2.0, or a lower and an upper one such as 0.5_5.0" in text


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("algorithm.rollout_correction.rollout_rs=token_k4", "did you mean token_k"),
        ("algorithm.rollout_correction.rollout_is=sequences", "did you mean sequence?"),
        ("algorithm.rollout_correction.rollout_si=token", "did you mean algorithm.rollout_correction.rollout_is?"),
        ("algorithm.filter_mode=ema", "did you mean ema_std?"),
        ("algorithm.filter_ema_ration=0.9", "did you mean algorithm.filter_ema_ratio?"),
        ("algorithm.adv_baseline=leave_one", "did you mean leave_one_out?"),
        ("algorithm.adv_estimator=reinforce_base", "did you mean reinforce_baseline?"),
        ("worker.actor.vespo_lambda_neg=-1", "must be at least 0"),
        ("worker.reward.overlong_buffer.length=3", "did you mean worker.reward.overlong_buffer.len?"),
        ("algorithm.reward_clip_range=3", "must be a list"),
    ],
)
def test_a_wrong_setting_of_an_algorithm_is_met_with_the_right_one(word: str, hint: str) -> None:
    assert hint in message_of(word)


def test_the_configuration_is_frozen_and_survives_json() -> None:
    config, _ = load("worker.actor.optim.betas=[0.8,0.9]")
    with pytest.raises(ValueError, match="frozen"):
        config.data.seed = 3  # type: ignore[misc]
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_saved_configuration_has_the_columns_of_the_run_and_no_others(tmp_path: Path) -> None:
    """What is null only because nobody set it is as `data` has it, and defaults are no columns that a user named."""
    saved = tmp_path / "experiment_config.json"
    for named in ([], ["data.prompt_key=problem"]):
        config, _ = load(*named, "data.val_sources=[{files: owner/rows@test, reward_function: gsm8k}]")
        saved.write_text(json.dumps(printable(config)))
        again, _ = load_config([f"config={saved}"], command="eval")
        (before,), (after,) = validation_sources(config.data), validation_sources(again.data)
        assert after == before
        assert after.explicit_columns == bool(named)
        assert after.columns[:2] == ("problem" if named else "prompt", "answer")


def test_no_password_of_a_url_and_no_secret_is_printed_or_saved() -> None:
    url = "https://user:planted@host/path"
    config, _ = load(f"trainer.project_name={url}")
    assert printable(config)["trainer"]["project_name"] == "https://***@host/path"
    assert hide_secrets(["r1", f"a={url}", "b.api_key=planted"]) == "r1 'a=https://***@host/path' 'b.api_key=***'"
    assert str(Problem("a", "is wrong", url)) == "a=https://***@host/path: is wrong"
    assert str(Problem("a.api_key", "is wrong", "planted")) == "a.api_key=***: is wrong"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("x" * 5000, "x" * 5000),
        ("algorithm.adv_estimator=[gae]", "algorithm.adv_estimator"),
        ("trainer.logger.a=3", "trainer.logger is a single value"),
        (f"{'y' * 9000}=3", "unknown key"),
    ],
)
def test_what_the_fuzzer_found_is_a_problem_of_the_configuration(word: str, told: str) -> None:
    assert told in message_of("trainer.logger=[file]", word)
