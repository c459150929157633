"""Each recipe's page, followed word for word: tiny stand-ins for models and rows, two steps a run, one device."""

import json
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from endtoend import R1, read_log
from patience import eventually
from recipes.pages import EXAMPLES, QUICKSTART, RECIPES, commands_of, stood_in
from recipes.stand_ins import save_stand_in
from vllm_server import healthy

SOURCES = {
    "agentica-org/DeepScaleR-Preview-Dataset@train": "mathematics.jsonl",
    "hiyouga/geometry3k@train": "geometry.parquet",
}
PREPARED = ("look", "sums", "reasoning_gym")  # their prepare.py makes a model in half a minute or more
STAND_INS = [  # in place of what it makes, and of rows that a package makes
    "data.train_files=examples/quickstart/train.parquet", "data.val_files=examples/quickstart/val.parquet",
    "worker.actor.model.model_path=examples/quickstart/model", "data.prompt_key=problem",
    "worker.reward.reward_function=text",
]  # fmt: skip
CONFIGS = sorted(
    path for path in EXAMPLES.glob("*/*.yaml") if path.name not in ("kuberay.yaml", "job.yaml", "stages.yaml")
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a stand-in, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def find(name: str) -> str:
        if name != QUICKSTART and not (folder / name).exists():
            save_stand_in(name, folder / name)
        return name if name == QUICKSTART else str(folder / name)

    return find


def follow(page: Path, r1: R1, model: str, desk: Path, change: Callable[[list[str]], list[str]] = list) -> list[str]:
    """Run the commands of a page; return what each of r1's printed."""
    recipe, printed = RECIPES[page.parent.name], []
    for command in commands_of(page):
        words = change(command)
        if words[0] == "python" and words[1].startswith("examples/"):
            run_script(words[1:])
        elif words[0] == "r1":
            printed.append(r1(*stood_in(words, recipe, model)[1:]).output)
        elif words[0] == "vllm":
            assert Path(words[2], "model.safetensors").is_file()
            assert all((desk / word).is_file() for word in words if word.endswith(".jinja"))
    return printed


def run_script(words: list[str]) -> None:
    before = sys.argv
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv = before


def runs(desk: Path) -> dict[str, Path]:
    """The folders of all runs by their experiments' names, each of which has taken two steps."""
    found = {path.parent.name: path.parent for path in desk.glob("checkpoints/*/*/experiment_log.jsonl")}
    for folder in found.values():
        assert [record["step"] for record in read_log(folder)] == [1, 2]
        assert (folder / "global_step_2/actor/model.safetensors").exists() or folder.name == "qlora"
    return found


def generations(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "generations.jsonl").read_text().splitlines()]


def follow_alone(name: str, r1: R1, models: Callable[[str], str], desk: Path) -> dict[str, Path]:
    follow(EXAMPLES / name / "README.md", r1, models(RECIPES[name].model), desk)
    assert (desk / "my-model/model.safetensors").is_file()
    return runs(desk)


def test_the_page_of_easyr1_runs(r1: R1, models: Callable[[str], str], desk: Path) -> None:
    assert follow_alone("easyr1", r1, models, desk).keys() == {"qwen2_5_vl_3b_geo_grpo"}


def test_the_page_of_geometry3k_runs(r1: R1, models: Callable[[str], str], desk: Path) -> None:
    assert follow_alone("geometry3k", r1, models, desk).keys() == {"qwen2_5_vl_3b", "qwen2_5_vl_7b"}


def test_the_page_of_r1v_runs(r1: R1, models: Callable[[str], str], desk: Path) -> None:
    assert follow_alone("r1v", r1, models, desk).keys() == {"clevr_counting", "geoqa"}


def test_a_base_model_goes_on_with_plain_text_and_is_merged_as_it_was(
    r1: R1, models: Callable[[str], str], desk: Path
) -> None:
    (folder,) = follow_alone("r1_zero", r1, models, desk).values()
    (prompt, *_) = {one["prompt"] for one in generations(folder)}
    assert prompt.endswith("Solution:")
    assert "<|" not in prompt
    assert not list((desk / "my-model").glob("chat_template*"))


def test_a_template_that_opens_the_thought_leaves_its_end_to_the_model(
    r1: R1, models: Callable[[str], str], desk: Path
) -> None:
    (folder,) = follow_alone("deepseek_r1_distill", r1, models, desk).values()
    for one in generations(folder):
        assert one["prompt"].endswith("<｜Assistant｜><think>\n")
        assert one["prompt"].count("<｜begin▁of▁sentence｜>") == 1
    assert read_log(folder)[0]["reward/thought/format"] >= 0


def test_llama_3_ends_at_each_of_its_ends_and_stays_without_padding(
    r1: R1, models: Callable[[str], str], desk: Path
) -> None:
    assert follow_alone("llama3", r1, models, desk).keys() == {"llama3_2_1b_gsm8k", "llama3_1_8b_gsm8k"}
    ends = json.loads((desk / "my-model/generation_config.json").read_text())["eos_token_id"]
    assert len(ends) == 3
    assert json.loads((desk / "my-model/tokenizer_config.json").read_text()).get("pad_token") is None


def test_both_pages_of_rlpr_run(r1: R1, desk: Path) -> None:
    folder = EXAMPLES / "rlpr"
    printed = follow(folder / "README.md", r1, QUICKSTART, desk)
    assert any("16 of 16 rows have a score" in said for said in printed)
    follow(folder / "text.md", r1, QUICKSTART, desk)
    found = runs(desk)
    assert found.keys() == {"shapes", "scored", "tiny"}
    assert not (found["scored"] / "score_a").exists()
    assert read_log(found["tiny"])[0]["reward/unscored_form"] == 1


@pytest.fixture
def reward_server() -> Iterator[Callable[[list[str]], str]]:
    """Starts the server of a command at a free port; the server's address."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(words: list[str]) -> str:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        words = [str(port) if word == "5000" else word for word in words]
        begun.append(subprocess.Popen([sys.executable, "-m", "r1_rewards.main", *words[1:]]))
        assert eventually(lambda: healthy(f"http://127.0.0.1:{port}/health") or begun[0].poll() is not None)
        return f"http://127.0.0.1:{port}/get_reward"

    yield start
    for process in begun:
        process.terminate()
        process.wait()


def test_the_page_of_lmm_r1_runs(
    r1: R1, models: Callable[[str], str], desk: Path, reward_server: Callable[[list[str]], str]
) -> None:
    page, servers = EXAMPLES / "lmm_r1/README.md", list[str]()
    save_classifier(desk / "classifier")

    def change(words: list[str]) -> list[str]:
        if words[0] == "r1-rewards":
            servers.append(reward_server(words))
        words = [SOURCES.get(word, word).replace("owner/helpful", "classifier") for word in words]
        words = [word.replace("owner/correct", "classifier") for word in words]
        asks = words[:2] == ["r1", "train"] and "worker.reward.reward_function=combine" not in words
        return [*words, f"worker.reward.reward_function={servers[0]}"] if asks else words

    follow(page, r1, models("qwen2_5_vl"), desk, change)
    found = runs(desk)
    assert found.keys() == {"text", "pictures", "ppo", "reinforce", "rloo", "mixed", "models", "qlora"}
    assert {"reward/accuracy_rewards", "reward/accuracy"} & read_log(found["text"])[0].keys()
    assert "critic/vf_loss" in read_log(found["ppo"])[1] or "critic/values/mean" in read_log(found["ppo"])[1]
    assert {"reward/helpful", "reward/correct"} <= read_log(found["models"])[0].keys()


def save_classifier(folder: Path) -> None:
    """A reward model: a sequence classifier with one output, and random weights."""
    import torch
    from families import make_config, make_tokenizer
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = make_config("qwen2")
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


@pytest.mark.quick
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_dry_run_accepts_every_configuration(config: Path, r1: R1, desk: Path) -> None:
    if config.parent.name == "lmm_r1":
        run_script(["examples/lmm_r1/make_rows.py", "mathematics.jsonl", "rows/text.jsonl"])
    words = STAND_INS if config.parent.name in PREPARED else []
    assert "optimizer steps" in r1("train", str(config.relative_to(EXAMPLES.parent)), *words, "--dry-run").output


# The sections that FlexAI's tutorial on EasyR1 shows, keys of that release included, with its own reward and template.
FLEXAI = """
data: {train_files: hiyouga/math12k@train, val_files: hiyouga/math12k@test, prompt_key: problem, answer_key: answer,
       format_prompt: ./code/easyR1/format_prompt/custom.jinja, max_prompt_length: 2048, max_response_length: 2048,
       rollout_batch_size: 512}
algorithm: {adv_estimator: grpo, use_kl_loss: true, kl_coef: 1.0e-2}
worker:
  actor: {model: {model_path: Qwen/Qwen2.5-7B-Instruct}, optim: {lr: 1.0e-6}, fsdp: {enable_cpu_offload: true}}
  rollout: {n: 5, temperature: 1.0, tensor_parallel_size: 2, gpu_memory_utilization: 0.6, enforce_eager: true}
  reward: {reward_type: batch, reward_function: ./code/easyR1/reward_function/custom.py:compute_score}
trainer: {total_epochs: 15, n_gpus_per_node: 8, val_freq: 5, save_freq: 5, save_model_only: false,
          logger: [file, wandb], project_name: easy_r1, experiment_name: qwen2_5_7b_math_grpo}
"""


@pytest.mark.quick
def test_the_configuration_of_flexais_tutorial_is_read_with_its_rewards_shape_and_template(r1: R1, desk: Path) -> None:
    files = {
        "config.yaml": FLEXAI,
        "format_prompt/custom.jinja": "{{ problem }}\n\nPlease solve this step by step.\n",
        "reward_function/custom.py": "def compute_score(prompts, responses, answers):\n"
        "    return [float(answer in response) for response, answer in zip(responses, answers)]\n",
    }
    for name, content in files.items():
        path = desk / "code/easyR1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    dapo = ["algorithm.adv_estimator=dapo", "algorithm.online_filtering=true", "trainer.experiment_name=dapo"]
    for words in ([], dapo):
        assert "optimizer steps" in r1("train", "config=code/easyR1/config.yaml", *words, "--dry-run").output


@pytest.mark.quick
def test_every_folder_with_a_page_stands_in_the_table_and_every_recipe_of_this_test_has_one() -> None:
    index = (EXAMPLES / "README.md").read_text()
    assert not [page for page in EXAMPLES.glob("*/README.md") if f"]({page.parent.name}/README.md)" not in index]
    assert {*RECIPES} == {path.parent.name for path in EXAMPLES.glob("*/README.md")} - {
        "quickstart", "gsm8k", "small_card", "r1_stages", *PREPARED,
    }  # fmt: skip


@pytest.mark.quick
def test_the_questions_of_the_page_are_ones_that_a_server_understands() -> None:
    asked: list[dict[str, object]] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    questions = [words for words in commands_of(EXAMPLES / "README.md") if words[0] == "curl"]
    for words in questions:
        words = [word.replace(":8000/", f":{server.server_port}/") for word in words]
        subprocess.run([*words, "--silent", "--fail", "--noproxy", "*"], check=True, capture_output=True)
    server.shutdown()
    text, picture = asked
    assert {text["model"], picture["model"]} == {"my-model"}
    assert "image_url" in json.dumps(picture["messages"])
