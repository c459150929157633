"""Every combination that cannot run is refused before anything is loaded, by name and with a way out."""

from pathlib import Path

import pytest

from r1_cli.build.engines import vllm
from r1_cli.config import ConfigError, load_config, unavailable, without_effect
from r1_cli.config.actor import CriticConfig

BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]
PLAIN = [*BASE, "trainer.n_gpus_per_node=1"]


def message_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, *words])
    assert len(caught.value.problems) == 1, str(caught.value)
    return str(caught.value.problems[0])


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (
            "worker.actor.global_batch_size=100 worker.rollout.n=8",
            "worker.actor.global_batch_size",
            "(512); 64 or 128 would do",
        ),
        ("data.mini_rollout_batch_size=100", "data.mini_rollout_batch_size", "must divide data.rollout_batch_size"),
        (
            "worker.actor.global_batch_size=2 worker.rollout.n=6",
            "worker.actor.global_batch_size",
            "× worker.rollout.n (6) = 12 sequences must be a multiple of the 8 data-parallel devices",
        ),
        (
            "worker.actor.dynamic_batching=false worker.actor.micro_batch_size_per_device_for_update=3",
            "worker.actor.micro_batch_size_per_device_for_update",
            "must divide the 80 sequences per device and optimizer step (global_batch_size × n ÷ devices); 2 or 4",
        ),
        (
            "worker.actor.dynamic_batching=false worker.actor.micro_batch_size_per_device_for_experience=3",
            "worker.actor.micro_batch_size_per_device_for_experience",
            "must divide the 320 sequences per device and step",
        ),
        ("worker.rollout.n=1", "worker.rollout.n", "at least 2"),
        (
            "worker.actor.router_replay=true worker.rollout.name=vllm",
            "worker.actor.router_replay",
            "needs the embedded engine: vLLM 0.32 returns experts by its model runner V2 alone",
        ),
        (
            "algorithm.kl_type=adaptive algorithm.kl_horizon=512",
            "algorithm.kl_horizon",
            "is too short: the 2560 samples of a step take more than 512, or the coefficient would fall to 0",
        ),
        (
            "worker.rollout.name=embedded worker.rollout.servers.urls=[http://a:8000]",
            "worker.rollout.name",
            "is not what worker.rollout.servers are",
        ),
        (
            "worker.rollout.servers.urls=[http://a:8000] worker.rollout.servers.weights_folder=/no/such/folder",
            "worker.rollout.servers.weights_folder",
            "is no folder",
        ),
        ("worker.rollout.servers.urls=[localhost:8000]", "worker.rollout.servers.urls", "should match pattern"),
        ("worker.rollout.n=1 algorithm.adv_estimator=rloo", "worker.rollout.n", "at least 2"),
        (
            "algorithm.adv_estimator=gae worker.critic.global_batch_size=100 worker.rollout.n=8",
            "worker.critic.global_batch_size",
            "512",
        ),
        ("data.val_batch_size=0", "data.val_batch_size", "-1 for all at once"),
        ("worker.actor.ulysses_size=3", "worker.actor.ulysses_size", "must divide trainer.n_gpus_per_node = 8"),
        (
            "trainer.nnodes=2 worker.actor.ulysses_size=16",
            "worker.actor.ulysses_size",
            "a sequence is shared by devices of one node",
        ),
        (
            "worker.actor.ulysses_size=2 worker.actor.padding_free=false",
            "worker.actor.ulysses_size",
            "set worker.actor.padding_free=true, or 1",
        ),
        ("worker.rollout.tensor_parallel_size=3", "worker.rollout.tensor_parallel_size", "n_gpus_per_node = 8"),
        (
            "trainer.nnodes=2 worker.rollout.tensor_parallel_size=16",
            "worker.rollout.tensor_parallel_size",
            "must divide trainer.n_gpus_per_node = 8: an engine is on one node",
        ),
        (
            "trainer.n_gpus_per_node=3 worker.rollout.name=vllm worker.rollout.n=6",
            "worker.rollout.tensor_parallel_size",
            "must divide trainer.n_gpus_per_node = 3",
        ),
        (
            "trainer.n_gpus_per_node=2 worker.rollout.engines.nnodes=1 worker.rollout.engines.n_gpus_per_node=3 "
            "worker.rollout.tensor_parallel_size=2",
            "worker.rollout.tensor_parallel_size",
            "must divide worker.rollout.engines.n_gpus_per_node = 3",
        ),
        (
            "worker.rollout.name=embedded worker.rollout.tensor_parallel_size=4",
            "worker.rollout.tensor_parallel_size",
            "must be 1 with the embedded engine",
        ),
        ("worker.rollout.engines.nnodes=1", "worker.rollout.engines.n_gpus_per_node", "above 0 with the other one"),
        (
            "trainer.max_staleness=1 trainer.n_gpus_per_node=2 worker.rollout.tensor_parallel_size=1",
            "trainer.max_staleness",
            "needs engines on devices of their own where several learn: set worker.rollout.engines.nnodes",
        ),
        (
            "trainer.max_staleness=1 trainer.n_gpus_per_node=1 worker.rollout.name=vllm "
            "worker.rollout.tensor_parallel_size=1",
            "trainer.max_staleness",
            "needs an engine beside the learner: worker.rollout.name=embedded",
        ),
        ("worker.rollout.engines.n_gpus_per_node=1", "worker.rollout.engines.nnodes", "above 0 with the other one"),
        ("worker.actor.fsdp.fsdp_size=3", "worker.actor.fsdp.fsdp_size", "n_gpus_per_node = 8), or be -1"),
        ("worker.actor.fsdp.fsdp_size=0", "worker.actor.fsdp.fsdp_size", "must divide"),
        (
            "trainer.nnodes=64 worker.actor.global_batch_size=32",
            "worker.actor.global_batch_size",
            "160 sequences must be a multiple of the 512 data-parallel devices",
        ),
        (
            "worker.rollout.name=vllm data.max_response_length=20480",
            "worker.rollout.max_num_batched_tokens",
            "must be at least data.max_prompt_length + data.max_response_length (22528)",
        ),
        ("worker.rollout.max_model_len=1000", "worker.rollout.max_model_len", "(4096), or null"),
        ("worker.rollout.temperature=0", "worker.rollout.temperature", "must be above 0 in training"),
        (
            "worker.rollout.name=vllm worker.rollout.temperature=2.1",
            "worker.rollout.temperature",
            "at most 2 with vLLM",
        ),
        ("worker.rollout.temperature=0.001", "worker.rollout.temperature", "at least 0.01, or 0"),
        (
            "worker.rollout.val_override_config.temperature=1e-9",
            "worker.rollout.val_override_config.temperature",
            "at least 0.01, or 0 for greedy answers",
        ),
        ("worker.rollout.top_k=0", "worker.rollout.top_k", "-1 for no limit"),
        ("worker.rollout.val_override_config.top_k=-2", "worker.rollout.val_override_config.top_k", "-1 for no limit"),
        (
            "worker.rollout.val_override_config.max_tokens=4096",
            "worker.rollout.val_override_config.max_tokens",
            "at most data.max_response_length (2048)",
        ),
        ("data.min_pixels=5000000", "data.min_pixels", "must be at most data.max_pixels (4194304)"),
        ("data.video_min_pixels=5000000", "data.video_min_pixels", "must be at most data.video_max_pixels (4194304)"),
        ("algorithm.online_filtering=true algorithm.filter_low=0.99", "algorithm.filter_low", "filter_high (0.99)"),
        (
            "algorithm.online_filtering=true algorithm.filter_mode=ema_std algorithm.filter_start_step=6",
            "algorithm.filter_start_step",
            "must be more than algorithm.filter_ema_start_step (6)",
        ),
        (
            "algorithm.online_filtering=true algorithm.filter_mode=ema_std worker.rollout.n=1 "
            "algorithm.adv_estimator=reinforce_plus_plus",
            "worker.rollout.n",
            "compares the answers to one prompt",
        ),
        ("algorithm.reward_clip_range=[1,-1]", "algorithm.reward_clip_range", "the lower and then the upper end"),
        ("worker.actor.clip_cov_lb=9", "worker.actor.clip_cov_lb", "must be less than worker.actor.clip_cov_ub (5.0)"),
        (
            "algorithm.rollout_correction.rollout_rs=token_k1",
            "algorithm.rollout_correction.rollout_rs_threshold",
            "is missing: the bound of rollout_rs",
        ),
        (
            "algorithm.rollout_correction.rollout_rs=token_k1,seq_mean_k3,seq_max_k2 "
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0,0.01",
            "algorithm.rollout_correction.rollout_rs_threshold",
            "one for each of the 3 in rollout_rs",
        ),
        (
            "algorithm.rollout_correction.rollout_rs=seq_mean_k3 "
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
            "algorithm.rollout_correction.rollout_rs_threshold",
            "must be a single upper bound for seq_mean_k3",
        ),
        (
            "algorithm.rollout_correction.rollout_rs=geometric algorithm.rollout_correction.rollout_rs_threshold=0.5",
            "algorithm.rollout_correction.rollout_rs_threshold",
            "must be at least 1 for seq_mean_k1",
        ),
        ("worker.reward.overlong_buffer.enable=true", "worker.reward.overlong_buffer.len", "is missing: how many"),
        (
            "worker.reward.overlong_buffer.enable=true worker.reward.overlong_buffer.len=4096",
            "worker.reward.overlong_buffer.len",
            "at most data.max_response_length (2048)",
        ),
        ("worker.actor.clip_ratio_low=1.5", "worker.actor.clip_ratio_low", "must be below 1"),
        ("worker.actor.optim.betas=[0.9,1.0]", "worker.actor.optim.betas", "must be below 1"),
        (
            "worker.actor.optim.strategy=adamw_bf16 worker.actor.fsdp.torch_dtype=fp32",
            "worker.actor.fsdp.torch_dtype",
            "must be bf16 or null: worker.actor.optim.strategy=adamw_bf16",
        ),
        ("trainer.val_only=true", "trainer.val_only", "needs data.val_files"),
        ("trainer.max_try_make_batch=0", "trainer.max_try_make_batch", "-1 for no limit"),
        ("data.train_files=null", "data.train_files", "is missing"),
        ("worker.actor.model.model_path=null", "worker.actor.model.model_path", "is missing"),
        ("worker.reward.reward_function=null", "worker.reward.reward_function", "is missing"),
        ("worker.reward.reward_function=maths", "worker.reward.reward_function", "did you mean 'math'?"),
        ("worker.reward.reward_function_kwargs.x=1", "worker.reward.reward_function_kwargs", "takes no 'x'"),
        ("worker.reward.reward_function=judge", "worker.reward.reward_function_kwargs", "argument: 'url'"),
        (
            "algorithm.adv_estimator=gdpo algorithm.use_kl_loss=false",
            "algorithm.use_kl_loss",
            "adv_estimator=gdpo has no place for a KL in the reward",
        ),
        (
            "worker.reward.reward_function=./no.py:f",
            "worker.reward.reward_function",
            f"there is no file {Path.cwd()}/no.py",
        ),
        ("data.format_prompt=no.jinja", "data.format_prompt", "no such file"),
        ("data.format_prompt={{content}}!", "data.format_prompt", "save it in a file"),
        ("data.override_chat_template=no.jinja", "data.override_chat_template", "no such file"),
        ("data.image_dir=no", "data.image_dir", "no such folder"),
        ("data.train_files=./no.jsonl", "data.train_files", "does not exist"),
        ("data.val_files=[owner/a@test,./no.parquet]", "data.val_files", "does not exist"),
        ("worker.actor.model.model_path=./no", "worker.actor.model.model_path", "no such folder"),
        ("trainer.load_checkpoint_path=no", "trainer.load_checkpoint_path", "no such folder"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, words: str, key: str, message: str
) -> None:
    monkeypatch.setenv("R1_SERVERS_TOKEN", "secret")
    text = message_of(*words.split())
    assert text.startswith(key)
    assert message in text


@pytest.mark.parametrize(
    "words",
    [
        "worker.actor.global_batch_size=512",
        "data.mini_rollout_batch_size=128",
        "worker.actor.dynamic_batching=false worker.actor.micro_batch_size_per_device_for_update=4",
        "worker.actor.dynamic_batching=true worker.actor.micro_batch_size_per_device_for_update=3",
        "worker.rollout.n=1 algorithm.adv_estimator=reinforce_plus_plus",
        "worker.actor.loss_type=cispo worker.actor.clip_ratio_low=0 worker.actor.clip_ratio_high=4",
        "worker.actor.ulysses_size=8 worker.actor.global_batch_size=1 worker.rollout.n=3",
        "trainer.n_gpus_per_node=1",
        "worker.rollout.val_override_config.temperature=0",
        "data.max_response_length=20480",
        "algorithm.filter_low=0.99",
        "algorithm.online_filtering=true algorithm.filter_mode=zero_variance algorithm.filter_low=0.99",
        "algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k2 "
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0,0.1",
        "data.min_pixels=null",
        "trainer.max_staleness=1 worker.rollout.engines.nnodes=1 worker.rollout.engines.n_gpus_per_node=4",
    ],
)
def test_what_can_run_is_not_refused(words: str) -> None:
    load_config([*BASE, *words.split()])


def test_near_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "math.jinja").write_text("{{ content }}", encoding="utf-8")
    assert f"did you mean {tmp_path / 'math.jinja'}?" in message_of(f"data.format_prompt={tmp_path / 'maths.jinja'}")


def test_a_reward_file_is_read_but_never_run(tmp_path: Path) -> None:
    reward, flag = tmp_path / "reward.py", tmp_path / "was_run"
    imports = "import json\nfrom re import match\n"
    reward.write_text(f"{imports}open({str(flag)!r}, 'w')\nNAME = 1\ndef compute_score(x): ...\n", encoding="utf-8")
    load_config([*BASE, f"worker.reward.reward_function={reward}:compute_score"])
    assert "did you mean 'compute_score'?" in message_of(f"worker.reward.reward_function={reward}:compute_scores")
    assert "(there are: compute_score)" in message_of(f"worker.reward.reward_function={reward}:compute_scores")
    assert f"write {reward}:NAME; it defines compute_score" in message_of(f"worker.reward.reward_function={reward}")
    reward.write_text("def broken(:\n", encoding="utf-8")
    message = message_of(f"worker.reward.reward_function={reward}:broken")
    assert f"{reward}, line 1: invalid syntax; correct the file" in message
    assert "unknown" not in message
    assert not flag.exists()


def test_a_reward_function_bound_in_another_way_is_accepted(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    for text in ("from json import loads as f\n", "f = len\n", "if True:\n    def f(x): ...\n", "from json import *\n"):
        reward.write_text(text, encoding="utf-8")
        load_config([*BASE, f"worker.reward.reward_function={reward}:f"])


def test_an_old_sequential_reward_must_say_so_in_its_file(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    words = [f"worker.reward.reward_function={reward}:f", "worker.reward.reward_type=sequential"]
    reward.write_text("def f(reward_input): ...\n", encoding="utf-8")
    assert 'add the line REWARD_TYPE = "sequential"' in message_of(*words)
    reward.write_text('REWARD_TYPE = "sequential"\ndef f(reward_input): ...\n', encoding="utf-8")
    load_config([*BASE, *words])


@pytest.mark.parametrize(
    "word",
    [
        "worker.actor.fsdp.torch_dtype=fp16",
        "worker.actor.fsdp.mp_param_dtype=fp16",
    ],
)
def test_an_option_that_is_not_there_yet_is_named(word: str) -> None:
    assert [str(limit) for limit in unavailable(*load_config([*PLAIN, word]))] == [word]


def test_of_several_devices_only_what_is_not_there_is_named() -> None:
    words = ["trainer.nnodes=2", "worker.actor.ulysses_size=2", "worker.rollout.tensor_parallel_size=4"]
    limits = unavailable(*load_config([*BASE, *words, "worker.actor.fsdp.torch_dtype=fp16"]))
    assert [limit.key for limit in limits] == ["worker.actor.fsdp.torch_dtype"]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "algorithm.online_filtering=true",
        "algorithm.kl_penalty=full",
        "algorithm.disable_kl=true algorithm.use_kl_loss=false",
        "worker.actor.loss_avg_mode=seq",
        "worker.actor.optim.lr_scheduler_type=cosine",
        "worker.actor.optim.strategy=adamw_bf16",
        "worker.actor.optim.strategy=adamw_bf16 worker.actor.fsdp.torch_dtype=bf16",
        "worker.rollout.name=embedded",
        "trainer.logger=[tensorboard,swanlab,mlflow]",
    ],
)
def test_what_is_there_is_not_named(words: str) -> None:
    assert unavailable(*load_config([*PLAIN, *words.split()])) == []


def test_options_without_effect_are_those_changed_from_their_default() -> None:
    words = ["worker.critic.optim.lr=1e-5", "trainer.project_name=r1"]
    limits = without_effect(*load_config([*PLAIN, *words]))
    assert [limit.key for limit in limits] == ["worker.critic.optim.lr"]


@pytest.mark.parametrize(
    ("word", "owner"),
    [
        ("worker.actor.vespo_k_pos=1", "worker.actor.loss_type=vespo"),
        ("algorithm.gamma=0.9", "algorithm.adv_estimator=reinforce_plus_plus"),
        ("algorithm.std_filter_beta=1", "algorithm.online_filtering=true algorithm.filter_mode=ema_std"),
        ("algorithm.filter_low=0.1", "algorithm.online_filtering=true"),
        ("algorithm.rollout_correction.rollout_is_threshold=3", "algorithm.rollout_correction.rollout_is=token"),
        ("worker.actor.loss_scale_factor=100", "worker.actor.loss_avg_mode=seq-mean-token-sum-norm"),
        ("worker.actor.optim.num_cycles=1", "worker.actor.optim.lr_scheduler_type=cosine"),
        ("worker.reward.overlong_buffer.len=100", "worker.reward.overlong_buffer.enable=true"),
    ],
)
def test_an_option_that_only_some_have_is_shown_to_the_others(word: str, owner: str) -> None:
    assert [limit.key for limit in without_effect(*load_config([*PLAIN, word]))] == [word.partition("=")[0]]
    assert without_effect(*load_config([*PLAIN, word, *owner.split()])) == []


@pytest.mark.parametrize("word", ["gpu_memory_utilization=0.9", "enable_chunked_prefill=true", "limit_images=3"])
def test_what_only_vllm_reads_is_shown_to_the_embedded_engine(word: str) -> None:
    words = [*PLAIN, f"worker.rollout.{word}"]
    shown = [limit.key for limit in without_effect(*load_config([*words, "worker.rollout.name=embedded"]))]
    assert shown == [f"worker.rollout.{word.partition('=')[0]}"]
    assert without_effect(*load_config([*words, "worker.rollout.name=vllm"])) == []


def test_vllm_is_named_as_missing_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (False, True):
        monkeypatch.setattr(vllm, "find_spec", lambda name, installed=installed: installed or None)
        limits = unavailable(*load_config([*PLAIN, "worker.rollout.name=vllm"]))
        assert [limit.key for limit in limits] == ([] if installed else ["worker.rollout.name"])


@pytest.mark.parametrize("word", ["worker.actor.optim.lr=0.0", "trainer.save_freq=0", "trainer.val_freq=0"])
def test_a_zero_that_is_seldom_meant_is_said(word: str) -> None:
    assert [str(limit) for limit in without_effect(*load_config([*PLAIN, word]))] == [word]


CRITIC = ["algorithm.adv_estimator=gae", "data.rollout_batch_size=8", "worker.actor.global_batch_size=4"]


def test_a_critic_has_the_batches_and_the_model_of_the_actor_unless_it_is_given_its_own() -> None:
    actors = ["worker.actor.micro_batch_size_per_device_for_update=3", "+worker.actor.model.override_config.x=1"]
    followed = load_config([*PLAIN, *CRITIC, *actors])[0].worker
    for key in ("global_batch_size", "micro_batch_size_per_device_for_update"):
        assert getattr(followed.critic, key) == getattr(followed.actor, key) != getattr(CriticConfig(), key)
    assert followed.critic.model.model_path == followed.actor.model.model_path
    assert followed.critic.model.override_config == {"x": 1}
    own = ["worker.critic.global_batch_size=2", "worker.critic.model.model_path=owner/critic"]
    given = load_config([*PLAIN, *CRITIC, *actors, *own])[0].worker.critic
    assert (given.global_batch_size, given.micro_batch_size_per_device_for_update) == (2, 3)
    assert (given.model.model_path, given.model.override_config) == ("owner/critic", {})
    assert load_config(PLAIN)[0].worker.critic == CriticConfig()


@pytest.mark.parametrize(
    "word",
    [
        "worker.critic.model.lora.rank=8",
        "worker.critic.model.lora.path=owner/adapter",
        "worker.critic.model.quantization=nf4",
        "worker.critic.optim.groups=[{'pattern':'.*','lr':1e-6}]",
        "worker.critic.fsdp.torch_dtype=fp16",
        "worker.critic.fsdp.mp_param_dtype=fp16",
    ],
)
def test_what_a_critic_cannot_do_is_refused_where_there_is_one(word: str) -> None:
    limits = unavailable(*load_config([*PLAIN, *CRITIC, word]))
    assert [limit.key for limit in limits] == [word.partition("=")[0]]
    assert unavailable(*load_config([*PLAIN, word])) == []


@pytest.mark.parametrize(
    "word",
    [
        "worker.critic.strategy=fsdp2",
        "worker.critic.model.tokenizer_path=owner/other",
        "worker.critic.model.lora.alpha=8",
        "worker.critic.fsdp.fsdp_size=1",
        "worker.critic.fsdp.use_orig_params=True",
    ],
)
def test_what_a_critic_has_no_use_for_is_said_once(word: str) -> None:
    assert [str(limit) for limit in without_effect(*load_config([*PLAIN, *CRITIC, word]))] == [word]
    assert [str(limit) for limit in without_effect(*load_config([*PLAIN, word]))] == [word]


# What EasyR1's `worker.critic` has, with other values than its defaults.
EASYR1 = {
    "strategy": "fsdp2", "global_batch_size": 2, "micro_batch_size_per_device_for_update": 5,
    "micro_batch_size_per_device_for_experience": 10, "max_grad_norm": 0.5, "cliprange_value": 0.2,
    "loss_avg_mode": "seq", "ppo_epochs": 2, "padding_free": False, "dynamic_batching": False,
    "ulysses_sequence_parallel_size": 1, "model.model_path": "owner/critic", "model.tokenizer_path": "owner/words",
    "model.override_config": "{a: 1}", "model.enable_gradient_checkpointing": False, "model.trust_remote_code": True,
    "model.freeze_vision_tower": True, "model.lora.rank": 8, "optim.lr": 1e-5, "optim.betas": "[0.9, 0.95]",
    "optim.weight_decay": 0.1, "optim.strategy": "adamw_bf16", "optim.lr_warmup_ratio": 0.1, "optim.min_lr_ratio": 0.1,
    "optim.lr_scheduler_type": "cosine", "optim.lr_warmup_steps": 3, "fsdp.enable_full_shard": False,
    "fsdp.enable_cpu_offload": True, "fsdp.enable_rank0_init": False, "fsdp.use_orig_params": True,
    "fsdp.torch_dtype": "bf16", "fsdp.fsdp_size": 2, "fsdp.mp_param_dtype": "fp32", "fsdp.mp_reduce_dtype": "bf16",
    "fsdp.mp_buffer_dtype": "bf16", "offload.offload_params": False, "offload.offload_optimizer": False,
}  # fmt: skip


def test_every_key_of_easyr1s_critic_is_taken_or_named() -> None:
    config, provenance = load_config([*PLAIN, *CRITIC, *(f"worker.critic.{key}={v}" for key, v in EASYR1.items())])
    changed = config.worker.critic
    assert (changed.loss_avg_mode, changed.fsdp.mp_reduce_dtype, changed.optim.betas) == ("seq", "bf16", (0.9, 0.95))
    assert [limit.key for limit in unavailable(config, provenance)] == ["worker.critic.model.lora.rank"]
    told = {limit.key.removeprefix("worker.critic.") for limit in without_effect(config, provenance)}
    assert {key for key in told if key in EASYR1} == {
        "strategy", "model.tokenizer_path", "fsdp.enable_rank0_init", "fsdp.use_orig_params", "fsdp.mp_buffer_dtype",
        "fsdp.fsdp_size",
    }  # fmt: skip


def test_a_warm_up_of_the_critic_that_outlasts_the_run_is_said() -> None:
    words = [*PLAIN, *CRITIC, "trainer.max_steps=3"]
    assert without_effect(*load_config([*words, "trainer.critic_warmup=2"])) == []
    (limit,) = without_effect(*load_config([*words, "trainer.critic_warmup=3"]))
    assert (limit.key, limit.reason) == ("trainer.critic_warmup", "the actor is never updated")


def test_batches_of_a_critic_that_do_not_fit_are_named_where_they_are_its_own() -> None:
    alone = [*PLAIN, *CRITIC, "worker.critic.dynamic_batching=false", "worker.rollout.n=2"]
    with pytest.raises(ConfigError) as error:
        load_config([*alone, "worker.critic.micro_batch_size_per_device_for_update=3"])
    (problem,) = error.value.problems
    assert problem.key == "worker.critic.micro_batch_size_per_device_for_update"
    assert "worker.critic.dynamic_batching=true" in problem.message
    with pytest.raises(ConfigError) as error:
        load_config([*PLAIN, *CRITIC, "worker.actor.global_batch_size=3"])
    assert [problem.key for problem in error.value.problems] == ["worker.actor.global_batch_size"]


def test_rewards_are_clipped_for_every_estimator() -> None:
    assert without_effect(*load_config([*PLAIN, "algorithm.reward_clip_range=[-1,1]"])) == []


def test_an_option_that_is_on_by_default_but_does_nothing_is_shown_where_the_user_sets_it() -> None:
    key = "worker.actor.use_torch_compile"
    assert [limit.key for limit in without_effect(*load_config([*PLAIN, f"{key}=true"]))] == [key]
    assert without_effect(*load_config([*PLAIN, f"{key}=false"])) == []
    assert without_effect(*load_config(PLAIN)) == []
