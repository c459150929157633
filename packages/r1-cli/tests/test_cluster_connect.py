"""What is said where there is no cluster to join, before Ray is imported, or where it cannot be joined."""

import re
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from r1_cli.cluster import ray_cluster
from r1_cli.cluster.ray_cluster import open_cluster
from r1_cli.cluster.worker_group import ClusterError
from r1_cli.config import ConfigError
from r1_cli.config.trainer import TrainerConfig
from r1_cli.hardware import Hardware

pytestmark = pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed")

TWO = TrainerConfig(nnodes=2, n_gpus_per_node=1)


@pytest.fixture(autouse=True)
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nobody has typed `ray start`, whatever runs on this one."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def refusal() -> str:
    with pytest.raises(ConfigError) as error, open_cluster(TWO, Hardware("cpu")):
        pass
    return str(error.value)


def test_without_a_cluster_the_two_commands_to_type_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = "ray" in sys.modules
    for unset in ("", "auto"):
        monkeypatch.setenv("RAY_ADDRESS", unset)
        said = refusal()
        first, other = re.findall(r"^ *(ray start.*)$", said, re.MULTILINE)
        assert first == "ray start --head --port=6379"
        address = re.fullmatch(r"ray start --address=(\S+):6379", other)
        assert address
        assert address[1] == ray_cluster.own_address()
        assert "trainer.nnodes=2" in said
    assert ("ray" in sys.modules) == imported


def test_an_address_at_which_nothing_answers_is_told_with_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = taken.getsockname()[1]
    noted = tmp_path / "ray/ray_current_cluster"
    noted.parent.mkdir()
    noted.write_text(f"127.0.0.1:{gone}\n")
    assert f"nothing answers at 127.0.0.1:{gone}" in refusal()
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where Ray puts it then
    assert f"nothing answers at 127.0.0.1:{gone}" in refusal()
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    assert "ray://127.0.0.1:10001 is no address like 10.0.0.1:6379" in refusal()
    assert "ray start --head" in refusal()


def test_a_cluster_of_other_versions_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **_: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with Python: 3.10.1")

    other = SimpleNamespace(init=refuse, exceptions=SimpleNamespace(RayError=OSError), shutdown=lambda: None)
    monkeypatch.setattr(ray_cluster, "_import_ray", lambda: other)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with (
            pytest.raises(ClusterError, match=rf"{address} cannot be joined: Version mismatch.*3\.10\.1"),
            open_cluster(TWO, Hardware("cpu")),
        ):
            pass


def test_a_ray_that_gives_up_on_a_busy_machine_is_told_of(tmp_path: Path) -> None:
    ray = MagicMock()
    ray.init.side_effect = Exception("The current node timed out during startup.")
    with pytest.raises(ClusterError, match=r"not started on this machine: The current node timed out.*same command"):
        ray_cluster._start(cast(ModuleType, ray), 2, tmp_path)


def test_a_machine_that_lacks_the_software_is_told_of() -> None:
    ray = MagicMock()
    ray.exceptions.RayError = LookupError
    node = {"Alive": True, "Resources": {"CPU": 2.0}, "NodeManagerAddress": "10.0.0.1"}
    ray.nodes.return_value = [node, node | {"NodeManagerAddress": "10.0.0.2"}]
    ray.get.side_effect = LookupError("ModuleNotFoundError: No module named 'r1_cli'")
    with (
        pytest.raises(ClusterError, match=r"a machine of the cluster cannot take part.*No module named 'r1_cli'"),
        ray_cluster._reserve_nodes(cast(ModuleType, ray), TWO, ray_cluster.COLOCATED),
    ):
        pass
    ray.util.remove_placement_group.assert_called_once_with(ray.util.placement_group.return_value)
