"""Weights on disk end with the process that wrote them, also where it was killed."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from r1_rollout.lora import Adapter
from r1_rollout.private_folder import PrivateFolder
from r1_rollout.transports.adapter import load_adapter
from r1_rollout.vllm.servers.server import LocalServer, ServerFailed

HOLD = """
import sys, time
from pathlib import Path
from r1_rollout.private_folder import PrivateFolder
folder = PrivateFolder(sys.argv[2], Path(sys.argv[1]))
(folder.path / "0.safetensors").write_bytes(b"weights")
print(folder.path, flush=True)
time.sleep(600)
"""


def hold(place: Path, kind: str = "r1-weights-") -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(place), kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    os.utime(folder, (0, 0))  # made long ago
    return process, folder


def test_what_a_killed_process_left_goes_with_the_next_and_what_is_in_use_stays(tmp_path: Path) -> None:
    (dead, left), (alive, used) = hold(tmp_path), hold(tmp_path)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    other = tmp_path / "r1-weights-of-somebody"  # without a lock, so not known to be anybody's
    other.mkdir()
    os.utime(other, (0, 0))
    try:
        with PrivateFolder("r1-weights-", tmp_path) as own:
            assert not left.exists()
            assert (used / "0.safetensors").is_file()
            assert other.is_dir()
            assert own.stat().st_mode & 0o777 == 0o700
        assert not own.exists()
    finally:
        alive.kill()
        alive.wait()


def start_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerFailed):
        LocalServer(lambda path: ["false"], name="server 0").start()


def take_up_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    request = ModuleType("vllm.lora.request")
    vars(request)["LoRARequest"] = lambda name, number, path: path
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    monkeypatch.setattr("r1_rollout.transports.adapter.adapted_modules", None)
    engine = SimpleNamespace(list_loras=list, add_lora=lambda path: Path(path, "adapter_config.json").read_text())
    llm = SimpleNamespace(llm_engine=engine, apply_model=lambda task: [["model.layers.0.self_attn.q_proj"]])
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    load_adapter(llm, Adapter(2, 4.0, ("q_proj",), [(name, torch.ones(2, 8))]), 0)


@pytest.mark.parametrize(("kind", "use"), [("r1-vllm-", start_server), ("r1-adapter-", take_up_adapter)])
def test_logs_and_adapters_of_killed_runs_go_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, use: Callable[[pytest.MonkeyPatch], None]
) -> None:
    dead, left = hold(tmp_path, kind)
    dead.kill()
    dead.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    use(monkeypatch)
    assert not left.exists()
    assert not [*tmp_path.glob(f"{kind}*")]
