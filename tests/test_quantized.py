"""A 4-bit base with an adapter: engine, learner and merged model compute the same numbers."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from endtoend import QUICKSTART, R1, SMALL, read_log
from transformers import AutoModelForImageTextToText

from r1_cli.models.adapters import Adapters, Form
from r1_cli.models.load import load_config, load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("bitsandbytes"), reason="bitsandbytes is not installed (extra qlora)"),
]
MODEL = "examples/quickstart/model"
QLORA = [
    "worker.actor.model.lora.rank=8", "worker.actor.model.quantization=nf4", "worker.actor.optim.lr=2e-3",
    "algorithm.disable_kl=false", "worker.rollout.name=embedded",
]  # fmt: skip


def test_a_run_on_a_base_in_four_bits_is_proven_and_merges(r1: R1, tmp_path: Path) -> None:
    r1(
        "train", QUICKSTART, *SMALL, *QLORA, "trainer.max_steps=2", "trainer.val_freq=-1", "trainer.save_freq=2",
        "trainer.val_before_train=false", f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    )  # fmt: skip
    records = read_log(tmp_path / "run")
    assert all(record["rollout/canary_gap"] < 4e-6 for record in records)
    assert records[0]["actor/kl_loss"] < records[1]["actor/kl_loss"]
    checkpoint = tmp_path / "run/global_step_2"
    r1("merge", checkpoint, "--output", tmp_path / "merged")
    form = Form(8, 64, "all-linear", ".*visual.*", checkpoint / "actor")
    cpu, tokens = torch.device("cpu"), torch.arange(20, 60)[None]
    with torch.no_grad():
        adapted, whole = (
            load_model(
                MODEL, config=load_config(MODEL), dtype=torch.float32, device=cpu, adapters=Adapters(form),
                quantization=quantization,
            )(input_ids=tokens).logits
            for quantization in ("nf4", None)
        )  # fmt: skip
        merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")(input_ids=tokens).logits
    assert (adapted - merged).abs().max() <= 2e-6 * adapted.abs().max()
    assert (adapted - whole).abs().max() > 0.01, "nothing was quantized"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["worker.actor.model.lora.rank=0"], "keeps weights that are not trained; set worker.actor.model.lora.rank"),
        (["worker.rollout.name=vllm"], "needs worker.rollout.name=embedded"),
        (["trainer.n_gpus_per_node=2"], "bitsandbytes #1945"),
    ],
)
def test_where_four_bits_would_not_be_right_they_are_refused(
    r1: R1, tmp_path: Path, words: list[str], said: str
) -> None:
    result = r1("train", QUICKSTART, *SMALL, *QLORA, *words, f"trainer.save_checkpoint_path={tmp_path}", ok=False)
    assert result.exit_code == 2
    assert said in result.stderr
