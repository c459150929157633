"""What commands and files of SFT, DPO, KTO and reward models come to: those of TRL, veRL and LLaMA-Factory."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_convert import run

from r1_cli.config import RunConfig, load_config
from r1_cli.config.convert.llamafactory import convert_llamafactory
from r1_cli.config.convert.trl import convert_trl
from r1_cli.config.convert.verl import convert_verl


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def accept(text: str) -> RunConfig:
    """Load a printed configuration as `r1 sft` does; it must refuse nothing."""
    Path("converted.yaml").write_text(text)
    return load_config(["converted.yaml"], command="sft")[0]


TRL_COMMAND = """
python -m pip install trl
accelerate launch --num_processes 2 trl/scripts/sft.py \\
    --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 \\
    --num_train_epochs 1 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --gradient_checkpointing --eos_token '<|im_end|>' --eval_strategy steps --eval_steps 100 \\
    --use_peft --lora_r 32 --lora_alpha 16 --output_dir Qwen2-0.5B-SFT --push_to_hub --fancy_new 3
"""


@pytest.mark.parametrize("way", ["script", "words", "quoted"])
def test_a_command_of_trls_sft(folder: Path, way: str) -> None:
    flags = TRL_COMMAND.partition("sft.py")[2].replace("\\\n", " ")
    if way == "script":
        (folder / "run.sh").write_text(TRL_COMMAND)
        words = ["run.sh"]
    else:
        words = [f"trl sft {flags}"] if way == "quoted" else ["trl", "sft", *flags.replace("'", "").split()]
    printed, told = run("convert", "trl", *words, "--devices", "2")
    assert "Converted from TRL's SFTConfig" in printed
    assert "fancy_new=3" in printed.partition("Unknown, and left out")[2]
    for name in ("packing=True: rows are packed", "eos_token=", "push_to_hub", "sft.train_on_prompt=true"):
        assert name in printed
    config = accept(printed)
    assert (config.sft.loss, config.sft.epochs, config.sft.train_on_prompt) == ("nll", 1, False)
    assert (config.data.train_files, config.data.val_files) == ("trl-lib/Capybara@train", "trl-lib/Capybara@test")
    assert (config.data.max_length, config.data.truncation) == (1024, "right")
    actor = config.worker.actor
    assert (actor.global_batch_size, actor.micro_batch_size_per_device_for_update) == (32, 2)
    assert (actor.optim.lr, actor.optim.lr_scheduler_type, actor.model.lora.rank) == (2e-4, "linear", 32)
    assert (config.trainer.val_freq, config.trainer.save_freq) == (100, 500)
    assert told == ""


DPO_SCRIPT = """
from trl import DPOConfig, DPOTrainer
rows = load_dataset("trl-lib/ultrafeedback", split="train")
size = 4
args = DPOConfig(
    "out", beta=0.2, label_smoothing=0.1, loss_type=["sigmoid"], max_length=2048, per_device_train_batch_size=size
)
trainer = DPOTrainer(model="Qwen/Qwen3-0.6B", args=args, train_dataset=rows)
"""


def test_a_python_script_of_trls_dpo() -> None:
    config = accept(convert_trl(DPO_SCRIPT, 1).text())
    assert (config.sft.loss, config.sft.beta, config.sft.label_smoothing) == ("cdpo", 0.2, 0.1)
    assert (config.worker.actor.model.model_path, config.data.max_length) == ("Qwen/Qwen3-0.6B", 2048)
    assert (config.worker.actor.optim.lr, config.worker.actor.global_batch_size) == (1e-6, 4)


@pytest.mark.parametrize(
    ("given", "trainer"),
    [
        ({"packing": True, "max_seq_length": 512}, "SFTConfig"),
        ({"beta": 0.1, "loss_type": "ipo", "max_length": 512}, "DPOConfig"),
        ({"desirable_weight": 1.0, "beta": 0.1}, "KTOConfig"),
        ({"num_generations": 4, "beta": 0.1}, "GRPOConfig"),
        ({"learning_rate": 1e-5}, "GRPOConfig"),
    ],
)
def test_the_keys_of_a_file_say_which_trainer_is_meant(given: dict[str, Any], trainer: str) -> None:
    made = convert_trl(yaml.safe_dump(given), 1)
    assert made.trainer == f"TRL's {trainer}"
    assert not made.unknown()
    assert made.settings.get("data.max_length", 512) in (512, 1024)


def test_a_trainer_may_be_named_and_a_command_may_name_a_file(folder: Path) -> None:
    (folder / "x.yaml").write_text("learning_rate: 1.0e-4\nloss_type: dft\nassistant_only_loss: true\n")
    made = convert_trl("trl sft --config x.yaml --learning_rate 3e-4", 1)
    assert (made.settings["sft.loss"], made.settings["worker.actor.optim.lr"]) == ("dft", 3e-4)
    assert "sft.train_on_prompt" not in str(made.remarks)
    assert convert_trl("learning_rate: 1.0e-4", 1, "kto").settings["sft.loss"] == "kto"
    assert convert_trl("completion_only_loss: false", 1, "sft").settings["sft.train_on_prompt"] is True


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_train_epochs": 1.5}, {"sft.epochs": 2}),
        ({"seed": 3}, {"data.seed": 3}),
        ({"seed": 3, "data_seed": 7}, {"data.seed": 7}),
        ({"dataset_name": "o/rows"}, {"data.train_files": "o/rows@train", "data.val_files": None}),
        ({"completion_only_loss": False, "assistant_only_loss": True}, {"sft.train_on_prompt": False}),
        ({"max_seq_length": 512}, {"data.max_length": 512}),
        ({"max_seq_length": 512, "max_length": 256}, {"data.max_length": 256}),
        ({"chat_template_path": "x.jinja"}, {"data.override_chat_template": "x.jinja"}),
        ({"chat_template_path": "owner/model"}, {"data.override_chat_template": None}),
        ({"beta": 0.1, "loss_type": "ipo", "label_smoothing": 0.1}, {"sft.loss": "ipo", "sft.label_smoothing": None}),
    ],
)
def test_keys_of_trl_that_decide_others(given: dict[str, Any], expected: dict[str, Any]) -> None:
    made = convert_trl(yaml.safe_dump(given), 1, "dpo" if "beta" in given else "sft")
    assert {key: made.settings.get(key) for key in expected} == expected


def test_what_is_otherwise_here_than_in_trl_is_said() -> None:
    assert "sums of log-probs" in convert_trl("loss_type: ipo", 1, "dpo").text()
    assert "sums of log-probs" not in convert_trl("loss_type: sigmoid", 1, "dpo").text()
    assert "chat_template_path=owner/model: " in convert_trl("chat_template_path: owner/model", 1, "sft").text()


REWARD_SCRIPT = """
from trl import RewardConfig, RewardTrainer
rows = load_dataset("owner/pairs", split="train")
args = RewardConfig("out", center_rewards_coefficient=0.01, max_length=512, per_device_train_batch_size=4)
adapter = LoraConfig(task_type="SEQ_CLS", r=8)
trainer = RewardTrainer(model="Qwen/Qwen3-0.6B", args=args, train_dataset=rows, peft_config=adapter)
"""


@pytest.mark.parametrize(
    "text",
    [
        REWARD_SCRIPT,
        "trl reward --dataset_name owner/pairs --model_name_or_path Qwen/Qwen3-0.6B --max_length 512 "
        "--center_rewards_coefficient 0.01 --per_device_train_batch_size 4 --use_peft --lora_r 8",
        "python trl/scripts/reward_modeling.py --model_name_or_path Qwen/Qwen3-0.6B --max_length 512 "
        "--dataset_name owner/pairs --center_rewards_coefficient 0.01 --per_device_train_batch_size 4 "
        "--lora_task_type SEQ_CLS",
    ],
)
def test_a_reward_model_of_trl(text: str) -> None:
    made = convert_trl(text, 1)
    assert made.trainer == "TRL's RewardConfig"
    assert not made.unknown()
    assert "every weight of a reward model is trained" in made.text()
    config = accept(made.text())
    assert (config.sft.loss, config.sft.center, config.data.max_length) == ("reward", 0.01, 512)
    assert (config.worker.actor.optim.lr, config.worker.actor.global_batch_size) == (1e-4, 4)
    assert (config.worker.actor.model.model_path, config.worker.actor.model.lora.rank) == ("Qwen/Qwen3-0.6B", 0)


def test_a_reward_function_of_a_file_is_no_reward_model() -> None:
    made = convert_trl("num_generations: 4\nreward_funcs: my_reward.py\n", 1)
    assert made.trainer == "TRL's GRPOConfig"
    assert convert_trl("center_rewards_coefficient: 0.02", 1).settings["sft.center"] == 0.02


@pytest.mark.parametrize(
    ("trainer", "instead"),
    [
        ("ORPO", "simpo"),
        ("CPO", "simpo"),
        ("GKD", "worker.teacher"),
        ("OnlineDPO", "r1 sample"),
        ("RLOO", "GRPOConfig"),
    ],
)
def test_a_trainer_of_trl_that_r1_lacks_is_refused_with_what_to_use(trainer: str, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"no counterpart of TRL's {trainer}Trainer; .*{instead}"):
        convert_trl(f"from trl import {trainer}Config\nargs = {trainer}Config(beta=0.1)\nSFTConfig()", 1)


@pytest.mark.parametrize(
    ("command", "trainer"),
    [
        ("python examples/scripts/dpo_online.py --dataset_name a/b", "OnlineDPO"),  # which has dpo in its name
        ("accelerate launch orpo.py --dataset_name a/b", "ORPO"),
        ("python cpo.py --dataset_name a/b", "CPO"),
        ("python gkd.py --dataset_name a/b", "GKD"),
        ("trl rloo --dataset_name a/b", "RLOO"),
    ],
)
def test_a_command_of_a_trainer_that_r1_lacks_is_refused(command: str, trainer: str) -> None:
    with pytest.raises(ValueError, match=f"no counterpart of TRL's {trainer}Trainer"):
        convert_trl(command, 1)


@pytest.mark.parametrize("loss", ["hinge", "robust", ["sigmoid", "sft"]])
def test_a_loss_of_trl_that_r1_lacks_is_refused(loss: object) -> None:
    with pytest.raises(ValueError, match=r"loss_type=.*r1 has sigmoid, ipo of DPOConfig"):
        convert_trl(json.dumps({"beta": 0.1, "loss_type": loss}), 1)


VERL_NEW = """
ENTRYPOINT=${ENTRYPOINT:-"-m verl.trainer.sft_trainer"}
FSDP_ENGINE_CONFIG="\\
    engine=fsdp optim=fsdp optim.lr=2e-5 optim.lr_warmup_steps_ratio=0.01 optim.weight_decay=0.1 \\
    optim.clip_grad=1.0 optim.min_lr_ratio=0.1 optim.warmup_style=cosine \\
    engine.ulysses_sequence_parallel_size=2 engine.strategy=fsdp2 engine.fsdp_size=-1"
torchrun --standalone --nnodes=1 --nproc-per-node=${NUM_TRAINERS:-8} \\
    ${ENTRYPOINT} \\
    data.train_files="train.jsonl" data.train_batch_size=96 data.max_length=2048 data.pad_mode=no_padding \\
    data.truncation=error data.use_dynamic_bsz=True data.max_token_len_per_gpu=65536 data.messages_key=turns \\
    model.path=Qwen/Qwen3-VL-2B-Instruct model.use_remove_padding=True ${FSDP_ENGINE_CONFIG} \\
    trainer.test_freq=-1 trainer.save_freq=4000 trainer.logger=['console','wandb'] trainer.total_epochs=10 \\
    trainer.project_name=p trainer.experiment_name=e trainer.default_local_dir=out trainer.resume_mode=auto \\
    trainer.max_ckpt_to_keep=5 checkpoint.save_contents=[model,optimizer,extra] engine.fancy=7
"""


def test_a_script_of_verls_sft(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"turns": []}')
    made = convert_verl(VERL_NEW, ["trainer.nnodes=2"])
    assert not made.unknown() or made.unknown() == ["engine=fsdp", "optim=fsdp"]
    assert any("engine.fancy=7: weights are sharded" in line for line in made.lost)
    config = accept(made.text())
    assert (config.sft.loss, config.sft.epochs) == ("nll", 10)
    assert (config.data.messages_key, config.data.max_length, config.data.truncation) == ("turns", 2048, "error")
    actor = config.worker.actor
    assert (actor.global_batch_size, actor.micro_batch_size_per_device_for_update) == (96, 32)
    assert (actor.dynamic_batching, actor.padding_free, actor.ulysses_size) == (True, True, 2)
    assert (actor.optim.lr_scheduler_type, actor.optim.lr_warmup_ratio, actor.optim.min_lr_ratio) == (
        "cosine",
        0.01,
        0.1,
    )
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes, config.trainer.save_limit) == (8, 2, 5)


def test_a_script_of_verls_older_sft_reads_entries_of_a_column() -> None:
    made = convert_verl(
        "torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \\\n -m verl.trainer.fsdp_sft_trainer \\\n"
        "data.train_files=a.parquet data.prompt_key=extra_info data.response_key=extra_info optim.lr=1e-4 "
        "data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] data.micro_batch_size_per_gpu=4 "
        "model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct trainer.total_epochs=1 model.lora_rank=32 "
        "model.lora_alpha=16 model.target_modules=all-linear data.truncation=left",
        [],
    )
    settings = made.settings
    assert (settings["data.prompt_key"], settings["data.answer_key"]) == ("extra_info.question", "extra_info.answer")
    assert (settings["worker.actor.model.lora.rank"], settings["worker.actor.model.lora.alpha"]) == (32, 16)
    assert settings["worker.actor.optim.betas"] == [0.9, 0.95]
    assert settings["data.truncation"] == "right"
    assert any("data.truncation=left" in line for line in made.lost)
    assert not made.unknown()
    turns = convert_verl("model: {partial_pretrain: m}\ndata: {multiturn: {enable: true, messages_key: dialog}}", [])
    assert turns.settings["data.messages_key"] == "dialog"
    assert "data.prompt_key" not in turns.settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("optim.lr_warmup_steps=-1", {"worker.actor.optim.lr_warmup_steps": None}),  # the ratio decides
        ("optim.lr_warmup_steps=9", {"worker.actor.optim.lr_warmup_steps": 9}),
        ("optim.lr=1e-4", {"trainer.save_limit": -1, "data.columns.enable_thinking": None}),
        ("data.enable_thinking_key=think", {"data.columns.enable_thinking": "think"}),
        ("optim.lr_scheduler_type=wsd", {"worker.actor.optim.lr_scheduler_type": "cosine"}),
        ("data.prompt_key=q data.response_key=a data.response_dict_keys=[a]", {"data.answer_key": "a"}),
        ("model.use_remove_padding=False", {"worker.actor.padding_free": False}),
    ],
)
def test_keys_of_verls_sft_that_decide_others(given: str, expected: dict[str, Any]) -> None:
    made = convert_verl(f"python -m verl.trainer.sft_trainer model.path=m optim.lr=1e-4 {given}", [])
    assert {key: made.settings.get(key) for key in expected} == expected
    assert ("wsd" in given) == any("optim.lr_scheduler=wsd" in line for line in made.lost)


LLAMA_FACTORY = {
    "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "image_max_pixels": 262144, "trust_remote_code": True,
    "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all",
    "dataset": "mllm_demo,identity,speech,gone", "template": "qwen2_vl", "cutoff_len": 4096, "max_samples": 1000,
    "overwrite_cache": True, "preprocessing_num_workers": 16, "dataloader_num_workers": 4, "mask_history": True,
    "output_dir": "saves/sft", "logging_steps": 10, "save_steps": 250, "plot_loss": True, "overwrite_output_dir": True,
    "report_to": "none", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True, "neat_packing": True,
    "ddp_timeout": 180000000, "resume_from_checkpoint": None, "fancy_new": 3, "val_size": 0.1,
}  # fmt: skip
OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
DATA_SETS = {
    "mllm_demo": {
        "file_name": "mllm_demo.json", "formatting": "sharegpt", "tags": OPENAI,
        "columns": {"messages": "messages", "images": "images"},
    },
    "identity": {"hf_hub_url": "owner/identity", "columns": {"prompt": "query", "response": "reply", "system": "sys"}},
    "speech": {"ms_hub_url": "owner/speech"},
    "dpo": {
        "file_name": "dpo.json", "ranking": True, "formatting": "sharegpt", "num_samples": 10,
        "columns": {"messages": "conversations", "chosen": "good", "rejected": "bad"},
        "tags": {"user_tag": "q", "assistant_tag": "gpt"},
    },
    "kto": {"file_name": "kto.json", "columns": {"kto_tag": "ok", "prompt": "instruction", "response": "output"}},
}  # fmt: skip


def write_llama_factory(folder: Path, **changes: Any) -> None:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/dataset_info.json").write_text(json.dumps(DATA_SETS))
    for name in ("mllm_demo", "dpo", "kto"):
        (folder / f"data/{name}.json").write_text('[{"messages": []}]')
    (folder / "examples").mkdir(exist_ok=True)
    (folder / "examples/x.yaml").write_text(yaml.safe_dump(LLAMA_FACTORY | changes))


@pytest.mark.parametrize("words", [["examples/x.yaml"], ["llamafactory-cli train examples/x.yaml learning_rate=1e-4"]])
def test_a_file_and_a_command_of_llama_factory(folder: Path, words: list[str]) -> None:
    write_llama_factory(folder)
    printed, told = run("convert", "llamafactory", *words, "--devices", "4")
    assert told == ""
    config = accept(printed)
    assert (config.sft.loss, config.sft.epochs, config.sft.turns) == ("nll", 3, "last")
    assert (config.data.max_length, config.data.truncation, config.data.max_pixels) == (4096, "right", 262144)
    assert config.data.min_pixels == 1024
    first, second = config.data.sources or []
    assert (first.files, second.files) == ("data/mllm_demo.json[:1000]", "owner/identity@train[:1000]")
    assert (second.prompt_key, second.answer_key) == ("query", "reply")
    assert second.columns is not None
    assert second.columns.system == "sys"
    assert (first.prompt_key, first.messages_key, first.tags) == (None, None, None)
    actor = config.worker.actor
    assert (actor.global_batch_size, actor.model.lora.rank, actor.model.lora.alpha) == (32, 8, 16)
    assert (actor.optim.lr, actor.optim.lr_warmup_ratio, actor.optim.lr_scheduler_type) == (1e-4, 0.1, "cosine")
    for name in ("val_size=0.1", "neat_packing=True", "template=qwen2_vl", "dataset=gone", "ms_hub_url=owner/speech"):
        assert name in printed
    assert "fancy_new=3" in printed.partition("Unknown, and left out")[2]
    for name in ("do_train", "plot_loss", "overwrite_cache"):
        assert name not in printed


def test_preferences_of_llama_factory(folder: Path) -> None:
    for loss, expected in (("sigmoid", "dpo"), ("ipo", "ipo"), ("simpo", "simpo")):
        write_llama_factory(folder, stage="dpo", dataset="dpo", pref_loss=loss, pref_beta=0.3, simpo_gamma=0.7)
        config = accept(run("convert", "llamafactory", "examples/x.yaml")[0])
        assert (config.sft.loss, config.sft.beta) == (expected, 0.3)
    assert config.sft.margin == 0.7
    data = config.data
    assert (data.prompt_key, data.answer_key, data.columns.rejected) == ("conversations", "good", "bad")
    assert (data.train_files, data.tags.user_tag) == ("data/dpo.json[:10]", "q")
    write_llama_factory(folder, stage="kto", dataset="kto", finetuning_type="full", kto_chosen_weight=2.0)
    printed, _ = run("convert", "llamafactory", "examples/x.yaml")
    config = accept(printed)
    assert (config.sft.loss, config.data.columns.label) == ("kto", "ok")
    assert config.worker.actor.model.freeze_vision_tower
    assert "kto_chosen_weight=2.0" in printed


def test_a_reward_model_of_llama_factory(folder: Path) -> None:
    write_llama_factory(folder, stage="rm", dataset="dpo", quantization_bit=4)
    printed, _ = run("convert", "llamafactory", "examples/x.yaml")
    config = accept(printed)
    assert (config.sft.loss, config.data.answer_key, config.data.columns.rejected) == ("reward", "good", "bad")
    assert not config.worker.actor.model.lora.used
    assert config.worker.actor.model.quantization is None
    assert "finetuning_type=lora: every weight of a reward model is trained" in printed


@pytest.mark.parametrize(
    ("changes", "expected", "lost"),
    [
        ({"pure_bf16": True, "bf16": False}, {"worker.actor.fsdp.mp_param_dtype": "bf16"}, None),
        ({"bf16": False}, {"worker.actor.fsdp.mp_param_dtype": "fp32"}, None),
        ({"quantization_bit": 4}, {"worker.actor.model.quantization": "nf4"}, None),
        (
            {"quantization_bit": 4, "finetuning_type": "full"},
            {"worker.actor.model.quantization": None},
            "quantization_bit=4",
        ),
        ({"mask_history": False}, {"sft.turns": "all"}, None),
    ],
)
def test_keys_of_llama_factory_that_decide_others(
    folder: Path, changes: dict[str, Any], expected: dict[str, Any], lost: str | None
) -> None:
    write_llama_factory(folder, **changes)
    made = convert_llamafactory((folder / "examples/x.yaml").read_text(), 1, folder)
    assert {key: made.settings.get(key) for key in expected} == expected
    assert lost is None or any(lost in line for line in made.lost)


def test_words_of_a_command_of_llama_factory_come_before_its_file_and_shares_need_interleaving(folder: Path) -> None:
    write_llama_factory(folder, dataset="mllm_demo,identity", interleave_probs="0.7,0.3", mix_strategy="concat")
    command = "llamafactory-cli train examples/x.yaml learning_rate=2e-4"
    made = convert_llamafactory(command, 1, folder)
    assert made.settings["worker.actor.optim.lr"] == 2e-4
    assert not any("weight" in source for source in made.settings["data.sources"])
    mixed = convert_llamafactory(f"{command} mix_strategy=interleave_under", 1, folder)
    assert [source["weight"] for source in mixed.settings["data.sources"]] == [0.7, 0.3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "ppo"}, "stage=ppo: `r1 train` is the stage"),
        ({"stage": "pt"}, "stage=pt: text without questions"),
        ({"stage": "dpo", "pref_loss": "orpo"}, "pref_loss=orpo: r1 has sigmoid, ipo, simpo"),
        ({"stage": "magic"}, "stage=magic is none of sft, dpo, kto, rm"),
    ],
)
def test_stages_of_llama_factory_that_r1_lacks_are_refused(folder: Path, changes: dict[str, str], message: str) -> None:
    write_llama_factory(folder, **changes)
    _, told = run("convert", "llamafactory", "examples/x.yaml", code=2)
    assert message in told


def test_a_file_that_is_not_there_is_named(folder: Path) -> None:
    for trainer in ("llamafactory", "trl"):
        assert "gone.yaml: no such file" in run("convert", trainer, "gone.yaml", code=2)[1]
    assert "gone.yaml: no such file" in run("convert", "llamafactory", "llamafactory-cli train gone.yaml", code=2)[1]
