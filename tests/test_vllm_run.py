"""Runs that sample with vLLM: the quickstart, and rows with every kind of media."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log
from safetensors.torch import load_file
from test_media import MIXED, write_rows

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
VLLM = "worker.rollout.name=vllm"
GAP = 1e-4  # float32; the largest of all sampled tokens, whose log-probs go down to -20


def test_the_quickstart_trains_with_vllm(r1: R1, tmp_path: Path) -> None:
    r1(
        "train", QUICKSTART, *SMALL, VLLM, "trainer.max_steps=3", "trainer.val_freq=3", "trainer.save_freq=-1",
        f"trainer.save_checkpoint_path={tmp_path}",
    )  # fmt: skip
    records = read_log(tmp_path)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert records[0]["val/accuracy_reward"] > 0.25  # it sees the pictures
    for record in records[1:]:
        assert record["rollout/logprob_gap_max"] < GAP
        assert record["rollout/effective_sample_size"] == pytest.approx(1, abs=1e-6)


def test_an_adapter_trains_with_vllm_which_has_the_base_from_its_files(r1: R1, tmp_path: Path) -> None:
    r1(
        "train", QUICKSTART, *SMALL, VLLM, "trainer.max_steps=2", "trainer.val_freq=-1", "trainer.save_freq=2",
        "trainer.val_before_train=false", "worker.actor.model.lora.rank=9", "worker.actor.optim.lr=2e-3",
        f"trainer.save_checkpoint_path={tmp_path}",
    )  # fmt: skip
    for record in read_log(tmp_path):
        assert record["rollout/logprob_gap_max"] < GAP
        assert record["rollout/canary_gap"] < 2e-5
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    folder = tmp_path / "global_step_2/actor"  # which vLLM serves as it is
    said, written = PEFTHelper.from_local_dir(str(folder), 512), load_file(folder / "adapter_model.safetensors")
    ends = set(said.target_modules)
    read = LoRAModel.from_local_checkpoint(str(folder), ends, said, lora_model_id=1, device="cpu").loras
    assert {f"base_model.model.{name}.lora_A.weight" for name in read} == {name for name in written if "lora_A" in name}
    assert {layer.rank for layer in read.values()} == {9}


def test_vllm_and_the_learner_agree_on_text_pictures_and_videos(r1: R1, tmp_path: Path) -> None:
    r1(
        "train", QUICKSTART, *MIXED, VLLM, f"data.train_files={write_rows(tmp_path)}", f"data.image_dir={tmp_path}",
        f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    )  # fmt: skip
    records = read_log(tmp_path / "run")
    assert len(records) == 2
    for record in records:
        assert record["rollout/logprob_gap_max"] < GAP


def test_a_cache_too_small_for_the_model_is_a_message_and_no_traceback(r1: R1, tmp_path: Path) -> None:
    result = r1(
        "train", QUICKSTART, *SMALL, VLLM, "worker.rollout.max_model_len=100000000",
        f"trainer.save_checkpoint_path={tmp_path}", ok=False,
    )  # fmt: skip
    assert result.exit_code == 2
    assert "vLLM cannot start" in result.output


def test_the_commands_of_the_page_have_options_that_vllm_knows() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    commands = re.findall(r"^vllm serve (.+)$", (ROOT / "docs/after-training.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        known = make_arg_parser(FlexibleArgumentParser()).parse_args(shlex.split(command))
        assert known.served_model_name == ["my-model"] or known.lora_modules[0].name == "mine"
