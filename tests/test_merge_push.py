"""`r1 merge`: the model card from a run's record, and `--push` to a server that stands for the hub."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import families
import pytest
import yaml
from endtoend import R1, read_log
from hub_server import TOKEN, Hub, serve_hub
from huggingface_hub import constants

from r1_cli.jobs.model_card import is_unedited, sign, write_card


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serve_hub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.address + "".join(template[1:]))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # whose protocol only the hub speaks
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


@pytest.fixture(scope="module")
def run(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's run, as if it had prompts and a secret among its reward's keywords."""
    folder = tmp_path_factory.mktemp("of the run")
    shutil.copytree(quickstart, folder / "run")
    (folder / "format.jinja").write_text("{{ content }} In ``` here.")
    file = folder / "run/experiment_config.json"
    settings = json.loads(file.read_text())
    settings["data"] |= {"format_prompt": str(folder / "format.jinja"), "system_prompt": "Count | well."}
    settings["data"]["val_files"] = "/secret/place/held_out.parquet"
    file.write_text(json.dumps(settings))
    return folder / "run"


def holding(secret: str, folder: Path) -> list[Path]:
    """The files that have a text in them."""
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_the_card_says_what_the_record_has(run: Path, r1: R1, tmp_path: Path) -> None:
    merged = tmp_path / "my-model"
    said = r1("merge", run / "global_step_2", "--output", merged)
    card = (merged / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {
        "library_name": "transformers", "pipeline_tag": "image-text-to-text",
        "tags": ["r1", "reinforcement-learning", "grpo"],
    }  # fmt: skip
    log = {record["step"]: record for record in read_log(run) if "val/reward_score" in record}
    start = json.loads((run / "manifest.json").read_text())["starts"][-1]
    first = log[0]["val/accuracy_reward"]
    for told in (
        "# my-model", "step 2 of its run", "`examples/quickstart/train.parquet[:256]`", "`held_out.parquet`",
        "`examples/quickstart/reward.py:compute_score`", "| advantage estimator | `grpo` |",
        "| learning rate | `0.0001` |",
        "coefficient `", f"| `accuracy_reward` | {first:.4g} (step 0) | {log[2]['val/accuracy_reward']:.4g} (step 2) |",
        f"| torch | {start['packages']['torch']} |", f"`{start['git']['commit']}`", "Count | well.",
        *(f"`{digest}`" for digest in start["rows"].values()), "````\n{{ content }} In ``` here.\n````",
    ):  # fmt: skip
        assert told in card, told
    assert "/secret" not in card
    assert str(run) not in card
    assert is_unedited(card)
    assert "step 3" not in card
    assert f"chat {merged!s}" in said.stderr.replace("'", "")
    prompts = json.loads((merged / "r1_prompts.json").read_text())
    assert prompts == {"system_prompt": "Count | well.", "format_prompt": "{{ content }} In ``` here."}


def test_a_card_of_ones_own_stays_and_r1s_own_is_renewed(run: Path, r1: R1, tmp_path: Path) -> None:
    merged = tmp_path / "m"
    r1("merge", run / "global_step_2", "--output", merged)
    first = (merged / "README.md").read_text()
    r1("merge", run / "global_step_3", "--output", merged)
    assert "step 3 of its run" in (merged / "README.md").read_text()
    for mine in (first.replace("step 2", "step 7").encode(), b"mine", b"", b"\xff"):
        (merged / "README.md").write_bytes(mine)
        said = r1("merge", run, "--output", merged)
        assert (merged / "README.md").read_bytes() == mine
        assert "README.md stays as it is" in said.output


def test_a_checkpoint_without_a_record_has_a_card_that_says_so(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "global_step_2", tmp_path / "global_step_2")
    card = write_card(tmp_path / "global_step_2", "x", vision=False)
    assert "left no record" in card
    assert yaml.safe_load(card.split("---\n")[1])["pipeline_tag"] == "text-generation"
    for damaged in ("", "{", "[]"):
        (tmp_path / "experiment_config.json").write_text(damaged)
        assert "left no record" in write_card(tmp_path / "global_step_2", "x", vision=False)


def test_a_record_of_another_trainer_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "global_step_7/actor").mkdir(parents=True)
    worker = {"actor": {"model": {"model_path": "Qwen/Qwen2.5-7B-Instruct"}}, "reward": {}}
    sources = [
        {"files": ["a.parquet", "/x/b.parquet"], "name": "sums", "reward_function": "math", "system_prompt": "S"}
    ]
    settings = {"data": {"sources": sources, "system_prompt": "T"}, "worker": worker}
    (tmp_path / "experiment_config.json").write_text(json.dumps(settings))
    card = write_card(tmp_path / "global_step_7", "x", vision=False)
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "Qwen/Qwen2.5-7B-Instruct"
    for told in (
        "step 7",
        "| sums | `a.parquet`, `b.parquet` | training |",
        "| `math` | – |",
        "```\nS\n```",
        "no manifest",
    ):
        assert told in card, told
    assert "did not validate" in card


def test_the_card_of_a_fine_tuned_model_names_no_reward(r1: R1, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three."}]
    (tmp_path / "rows.jsonl").write_text(8 * f"{json.dumps({'messages': turns})}\n")
    model = families.save_model("qwen3", tmp_path / "model")
    r1(
        "sft", f"data.train_files={tmp_path}/rows.jsonl", f"worker.actor.model.model_path={model}",
        "data.max_length=64",
        "worker.actor.global_batch_size=8", "sft.epochs=2", "trainer.logger=[file]", "trainer.n_gpus_per_node=1",
        f"trainer.save_checkpoint_path={tmp_path}/run", "data.val_files=null", "worker.rollout.tensor_parallel_size=1",
    )  # fmt: skip
    r1("merge", tmp_path / "run", "--output", tmp_path / "merged")
    card = (tmp_path / "merged/README.md").read_text()
    assert "fine-tuned with r1: step 2 of its run" in card
    assert "| loss | `nll` |" in card
    assert "## Rewards" not in card
    assert "KL to the reference" not in card


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_uploaded_as_private_with_its_card_and_the_token_is_written_nowhere(
    run: Path, r1: R1, tmp_path: Path, hub: Hub
) -> None:
    said = r1("merge", run, "--output", tmp_path / "merged", "--push", "me/my-model")
    assert hub.private == {"me/my-model": True}
    there = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir() if path.is_file()}
    assert hub.files["me/my-model"] == there
    assert len(hub.objects) == 1
    assert f"{hub.address}/me/my-model" in said.stdout
    assert "to me/my-model, private" in said.stderr
    assert TOKEN not in said.output
    assert not holding(TOKEN, tmp_path)
    assert not holding(TOKEN, run)
    assert hub.tokens <= {f"Bearer {TOKEN}", None}


def test_a_repository_that_is_there_keeps_its_card_and_stays_private(
    run: Path, r1: R1, tmp_path: Path, hub: Hub
) -> None:
    r1("merge", run / "global_step_2", "--output", tmp_path / "merged", "--push", "me/x")
    said = r1("merge", run / "global_step_3", "--output", tmp_path / "merged", "--push", "me/x", "--public")
    assert hub.private == {"me/x": True}
    assert "me/x exists and stays private" in said.stderr
    assert b"step 3 of its run" in hub.files["me/x"]["README.md"]
    hub.files["me/x"]["README.md"] = b"mine"
    said = r1("merge", run / "global_step_2", "--output", tmp_path / "merged", "--push", "me/x")
    assert hub.files["me/x"]["README.md"] == b"mine"
    assert "has a README.md of its own, which stays" in said.stderr


def test_public_is_public(run: Path, r1: R1, tmp_path: Path, hub: Hub) -> None:
    r1("merge", run, "--output", tmp_path / "merged", "--push", "me/open", "--public")
    assert hub.private == {"me/open": False}


@pytest.mark.parametrize(
    ("repo", "token", "told"),
    [
        ("me/x", "", "there is no token; set HF_TOKEN, or run `hf auth login`"),
        ("me/x", "hf_wrong", "refused it"),
        ("others/x", TOKEN, "rights to create"),
        ("not a name", TOKEN, "not a name"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence_and_the_merged_folder_remains(
    repo: str, token: str, told: str, run: Path, r1: R1, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    said = r1("merge", run, "--output", tmp_path / "merged", "--push", repo, ok=False)
    assert said.exit_code == 2
    assert f"r1: --push {repo}" in said.stderr
    assert told in said.stderr
    assert (tmp_path / "merged/model.safetensors").is_file()
    assert not any(hub.files.values())


def test_a_hub_that_cannot_be_reached_is_a_sentence(
    run: Path, r1: R1, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    said = r1("merge", run, "--output", tmp_path / "merged", "--push", "me/x", ok=False)
    assert said.exit_code == 2
    assert "http://127.0.0.1:9 cannot be reached" in said.stderr


@pytest.mark.slow
def test_hf_endpoint_and_hf_token_are_what_a_push_reads(run: Path, tmp_path: Path) -> None:
    with serve_hub() as hub:
        words = ["merge", str(run), "--output", str(tmp_path / "merged"), "--push", "me/my-model"]
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        environment |= {"HF_HUB_DISABLE_XET": "1"}
        said = subprocess.run(
            [sys.executable, "-m", "r1_cli.main", *words], env=environment, capture_output=True, text=True
        )
        assert said.returncode == 0, said.stderr
        assert "model.safetensors" in hub.files["me/my-model"]
    assert not holding(TOKEN, tmp_path / "home")


def test_public_without_push_is_refused(r1: R1, tmp_path: Path) -> None:
    said = r1("merge", tmp_path, "--public", ok=False)
    assert "--public takes --push" in said.stderr


def test_a_card_is_known_again_only_unchanged() -> None:
    card = sign("# x\n\ntext with <!-- a comment -->\n")
    assert is_unedited(card)
    assert not any(is_unedited(other) for other in ("", card + " ", card.replace("text", "texts"), "# x\n", f"x{card}"))
    assert is_unedited(sign(""))
