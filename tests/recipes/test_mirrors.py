"""Models and rows from a mirror of the Hugging Face hub, or from ModelScope. Nothing leaves this machine."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from endtoend import R1, ROOT, read_log
from faults_table import note_fault
from recipes.pages import TINY
from recipes.rows import write_rows
from recipes.stand_ins import save_stand_in

WORDS = [
    "examples/llama3/config.yaml", "worker.actor.model.model_path=owner/model", "data.train_files=owner/rows@train",
    "data.val_files=null", *TINY, "trainer.max_steps=1",
]  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """`model`, and `rows` with a training split."""
    save_stand_in("llama3", tmp_path / "model")
    write_rows(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "words.jsonl").rename(tmp_path / "rows/train.jsonl")
    return tmp_path


@pytest.mark.quick
def test_a_run_takes_model_and_rows_from_modelscope(r1: R1, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def give(name: str, **_: object) -> str:
        asked.append(name)
        return str(folders / name.partition("/")[2])

    modelscope = SimpleNamespace(snapshot_download=give, dataset_snapshot_download=give)
    monkeypatch.setitem(sys.modules, "modelscope", modelscope)
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    r1("train", *WORDS, f"trainer.save_checkpoint_path={folders / 'run'}")
    assert read_log(folders / "run")[-1]["step"] == 1
    assert {*asked} == {"owner/model", "owner/rows"}
    assert (folders / "run/global_step_1/actor/generation_config.json").is_file()


@pytest.mark.quick
def test_modelscope_that_is_not_installed_is_said(r1: R1, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    refused = r1("train", *WORDS, f"trainer.save_checkpoint_path={folders / 'run'}", ok=False)
    assert refused.exit_code == 2
    assert "pip install modelscope" in refused.output


@pytest.fixture
def mirror(folders: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves `folders/model` as a mirror of the hub does; its address, and what it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            if (folders / "away").exists():
                asked.append(f"{(folders / 'away').read_text()}: {self.path}")
                self.close_connection = True  # without an answer
                return
            asked.append(self.path)
            name = self.path.partition("/resolve/main/")[2]
            file = folders / "model" / name
            found = bool(name) and self.path.startswith("/owner/model/") and file.is_file()
            content = file.read_bytes() if found else b"{}"
            self.send_response(200 if found else 404)
            if not found:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{name}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


TRAIN = """
import sys
from pathlib import Path
from r1_cli.jobs import train
from r1_cli.main import main
folder, take_steps = Path(sys.argv[1]), train.take_steps

def without_the_hub(*args):
    (folder / "away").write_text("in the run")
    return take_steps(*args)

train.take_steps = without_the_hub
main([*sys.argv[2:], "trainer.max_steps=1"], standalone_mode=False)
(folder / "away").write_text("at the second start")
main([*sys.argv[2:], "trainer.max_steps=2"], standalone_mode=False)
"""


def test_the_hub_is_asked_where_hf_endpoint_says_and_may_go_away_when_the_run_has_begun(
    mirror: tuple[str, list[str]], folders: Path
) -> None:
    """In a process of its own: the hub's library reads the address when it is loaded."""
    address, asked = mirror
    proxies = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    environment = {**os.environ, **proxies, "HF_ENDPOINT": address, "HF_HOME": str(folders / "home")}
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    rows = f"{folders}/rows/train.jsonl"
    words = ["train", *WORDS, f"data.train_files={rows}", f"data.val_files={rows}", "trainer.val_freq=1"]
    words += ["trainer.save_freq=1", f"trainer.save_checkpoint_path={folders / 'run'}"]
    done = subprocess.run([sys.executable, "-c", TRAIN, str(folders), *words], cwd=ROOT, env=environment, text=True)
    assert done.returncode == 0
    assert "/owner/model/resolve/main/config.json" in asked
    assert any(one.startswith("at the second start: /owner/model") for one in asked)
    assert not [one for one in asked if one.startswith("in the run")]
    assert [record["step"] for record in read_log(folders / "run")][-2:] == [1, 2], "without the hub, it resumes"
    note_fault("a hub that is away after the start", outcome="goes on")
    kept = json.loads((folders / "run/global_step_2/actor/generation_config.json").read_text())
    assert len(kept["eos_token_id"]) == 3


@pytest.mark.quick
def test_a_run_takes_its_model_from_a_url(r1: R1, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(folders / "home"))
    url, memory = f"memory://{folders.name}/model", fsspec.filesystem("memory")
    memory.put(f"{folders}/model", f"/{folders.name}/model", recursive=True)
    words = [f"worker.actor.model.model_path={url}", f"data.train_files={folders}/rows/train.jsonl"]
    r1("train", *WORDS, *words, f"trainer.save_checkpoint_path={folders / 'run'}")
    assert read_log(folders / "run")[-1]["step"] == 1
    assert (folders / "run/global_step_1/actor/generation_config.json").is_file()
    (kept,) = (folders / "home/r1-urls").glob("*/files-*")
    assert {path.name for path in kept.iterdir()} == {path.name for path in (folders / "model").iterdir()}
