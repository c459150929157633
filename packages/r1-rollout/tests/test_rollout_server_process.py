"""A server that r1 starts is locked, watched, restarted with the current weights, and outlives nobody."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import END, answer
from faults_table import note_fault
from server_pools import wait_for

import r1_rollout
from r1_rollout.sampling import sample_seed
from r1_rollout.transports.folder import read_shards, write_shards
from r1_rollout.types import SamplingParams
from r1_rollout.vllm.client import Endpoint, ServerFault, ask
from r1_rollout.vllm.guard import TokenGuard
from r1_rollout.vllm.servers.pool import ServerPool
from r1_rollout.vllm.servers.pooled_server import Deadlines
from r1_rollout.vllm.servers.server import LocalServer, ServerFailed, vllm_command
from r1_rollout.vllm.servers.supervisor import ServersLost
from r1_rollout.weights import LocalWeights

pytestmark = pytest.mark.slow

FAKE = Path(__file__).with_name("fake_vllm.py")
SOURCES = str(Path(r1_rollout.__file__).parents[1])
PARAMS = SamplingParams(max_tokens=6, n=2, seed=5)
QUICK = Deadlines(stall=60.0, load=60.0, probe=0.01, recovery=120.0)


class Row:
    model_inputs: dict[str, Any] = {}  # noqa: RUF012
    position_ids: Any = None

    def __init__(self, number: int) -> None:
        self.id = f"row {number}"
        self.token_ids = [5, 6]


def weights() -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.ones(4))]


def local(name: str = "server 0", **environment: str) -> LocalServer:
    environment["PYTHONPATH"] = os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(FAKE)]
    return LocalServer(lambda path: [*command, path], name=name, environment=environment, start_timeout=120)


def running(group: int) -> bool:
    """Whether a process group has a process that is not a zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def test_a_server_wants_its_token_and_hides_it(tmp_path: Path) -> None:
    server = local()
    try:
        server.start()
        assert ask(server.endpoint, "GET", "/health", timeout=60) is None
        with pytest.raises(ServerFault, match="does not take this token"):
            ask(Endpoint(server.endpoint.url, "guess"), "GET", "/health", timeout=60)
        socket_path = Path(server.endpoint.url.removeprefix("unix:"))
        assert socket_path.parent.stat().st_mode & 0o777 == 0o700
        assert server.endpoint.token
        assert server.endpoint.token not in Path(f"/proc/{server.pid}/cmdline").read_text()
        first, group = server.endpoint.token, server.pid
        server.start()
        assert server.endpoint.token != first
        assert group is not None
        wait_for(lambda: not running(group))
    finally:
        server.stop()
    assert not socket_path.parent.exists()


def test_a_server_that_cannot_start_shows_its_log() -> None:
    with pytest.raises(ServerFailed, match=r"server 0 did not start \(the process ended\).*\n(.*\n)*.*nobody knows"):
        local(FAKE_START="broken").start()
    pool = ServerPool([local(FAKE_START="broken")], end_token_ids={END}, deadlines=QUICK)
    with pool, pytest.raises(ServersLost, match=r"lost(.*\n)*.*nobody knows"), pool.active(LocalWeights(weights(), 0)):
        pass


def test_a_killed_server_loses_nothing_and_comes_back_with_the_current_weights() -> None:
    servers = [local("server 0", FAKE_DIES_AT="20"), local("server 1")]
    rows = [Row(i) for i in range(200)]
    with ServerPool(servers, end_token_ids={END}, deadlines=QUICK, max_sequences=8) as pool:
        with pool.active(LocalWeights(weights(), 4)):
            before = servers[0].pid
            groups = list(pool.generate(rows, PARAMS))
            assert sorted(index for index, _ in groups) == list(range(200))
            for index, group in groups:
                seed = sample_seed(PARAMS.seed, rows[index].id, 0)
                assert [one.token_ids.tolist() for one in group] == [answer(seed, i, 6)[0] for i in range(2)]
            wait_for(lambda: servers[0].alive and all(server.state == "ready" for server in pool._supervisor.servers))
            assert servers[0].pid != before
            label = pool._supervisor.servers[1].label
            assert ask(servers[0].endpoint, "GET", "/weight_info", timeout=60) == {"weight_version": label}
            os.killpg(servers[1].pid or 0, signal.SIGKILL)
            assert len(list(pool.generate(rows[:10], PARAMS))) == 10
        with pool.active(LocalWeights(weights(), 5)):
            wait_for(lambda: all(server.state == "ready" for server in pool._supervisor.servers))
            assert {server.label for server in pool._supervisor.servers} == {pool._supervisor.current.label}  # type: ignore[union-attr]
        pids = [server.pid or 0 for server in servers]
    wait_for(lambda: not any(map(running, pids)))
    note_fault("SIGKILL of a vLLM server", outcome="goes on")


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = f"""
import sys, time
sys.path[:0] = {[str(FAKE.parent), *sys.path]!r}
from test_rollout_server_process import local
server = local()
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""
    environment = os.environ | {
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")]),
    }
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    assert running(group)
    parent.kill()
    parent.wait()
    wait_for(lambda: not running(group))


def test_the_guard_lets_nobody_in_without_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        TokenGuard(None)  # type: ignore[arg-type]
    monkeypatch.setenv("VLLM_API_KEY", "right")
    inside = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        inside.append(scope.get("path"))

    def knock(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> Any:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": kind, "path": path, "headers": list(headers)}
        asyncio.run(TokenGuard(app)(scope, None, send))  # type: ignore[arg-type]
        return sent[0] if sent else None

    for path in ("/collective_rpc", "/health", "/v1/models", "/update_weights"):
        assert knock(path)["status"] == 401
        assert knock(path, (b"authorization", b"Bearer wrong"))["status"] == 401
    assert knock("/ws", kind="websocket")["type"] == "websocket.close"
    assert inside == []
    assert knock("/collective_rpc", (b"Authorization", b"Bearer right")) is None
    assert knock("", kind="lifespan") is None
    assert inside == ["/collective_rpc", ""]


def test_the_command_line_has_what_a_server_needs() -> None:
    words = vllm_command("folder", {"dtype": "float32", "enforce_eager": True, "seed": None, "x": False})("/socket")
    assert {"--model=folder", "--dtype=float32", "--enforce-eager", "--uds=/socket", "--enable-scale-out"} <= set(words)
    assert "--enable-prompt-tokens-details" in words
    assert not any(word.startswith(("--seed", "--x")) for word in words)


def test_shards_are_of_bounded_size_whole_or_absent_and_read_back_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    table = torch.randn(8, 16)
    named = [
        ("embed", table),
        ("head", table),
        ("view", table.T),
        ("big", torch.randn(100, 16)),
        ("ids", torch.arange(3)),
    ]
    shapes = write_shards(named, tmp_path / "w", max_bytes=1100)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in named}
    back = dict(read_shards(tmp_path / "w"))
    assert all(torch.equal(back[name], tensor) for name, tensor in named)
    sizes = sorted(file.stat().st_size for file in (tmp_path / "w").iterdir())
    assert len(sizes) == 4
    assert sizes[-2] < 1100 + 500  # but for the tensor that is larger by itself, and the files' headers
    write_shards(named, tmp_path / "half", max_bytes=1100, dtype=torch.bfloat16)
    half = dict(read_shards(tmp_path / "half"))
    assert half["big"].dtype == torch.bfloat16
    assert half["ids"].dtype == torch.int64

    def breaks() -> Any:
        yield named[0]
        raise OSError("the learner has died")

    with pytest.raises(OSError, match="learner has died"):
        write_shards(breaks(), tmp_path / "none", max_bytes=100)
    assert {path.name for path in tmp_path.iterdir()} == {"w", "half"}
    with pytest.raises(FileNotFoundError, match="has no weights"):
        list(read_shards(tmp_path / "none"))
