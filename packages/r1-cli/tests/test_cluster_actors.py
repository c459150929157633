"""Actors in a private Ray cluster: asked together, ended by the first error, and gone with the run."""

import json
import os
import re
import tempfile
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
from cluster_toys import LastingToy, Toy, Unpicklable
from faults_table import note_fault
from patience import LONG, eventually

from r1_cli.cluster.ray_cluster import open_cluster, own_versions, require_same_versions
from r1_cli.cluster.worker_group import ClusterError
from r1_cli.config import ConfigError
from r1_cli.config.trainer import TrainerConfig
from r1_cli.hardware import Hardware


def traces() -> tuple[set[int], set[Path], set[Path]]:
    """Processes of this one, folders of private clusters, and what Ray keeps in the home."""
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    return children, set(Path(tempfile.gettempdir()).glob("r1-ray-*")), set(Path.home().glob(".ray/*"))


@pytest.fixture(scope="module")
def others():
    """What this process had started before: ranks that the tests of other modules keep."""
    return traces()[0]


@pytest.fixture(scope="module")
def node(tmp_path_factory, others):
    if not find_spec("ray"):
        pytest.skip("ray is not installed")
    timeline = tmp_path_factory.mktemp("told") / "new/timeline.json"
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="r1-") as own:
        patch.setattr(tempfile, "tempdir", own)  # where nobody else's clusters are; a short name, as sockets need
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where an actor finds the toys
        left = Path(own, "r1-ray-left")  # by a run that was killed long ago
        left.mkdir()
        (left / ".lock").touch()
        os.utime(left, (0, 0))
        before = traces()
        with open_cluster(TrainerConfig(n_gpus_per_node=2, ray_timeline=str(timeline)), Hardware("cpu")) as machines:
            assert not left.exists()
            yield machines.learner[0]
            during = [child for child in psutil.Process().children(recursive=True) if child.pid not in others]
        assert psutil.wait_procs(during, timeout=LONG)[1] == []
        assert all(now <= then for now, then in zip(traces(), before, strict=True))
    assert any(event["cat"] == "task::learner-0.about" for event in json.loads(timeline.read_text()))


@contextmanager
def two_toys(node, logs, name, **options):
    from r1_cli.cluster.actors import ActorGroup, ActorPlacement

    actors = ActorGroup(
        [ActorPlacement(f"{name}-{i}", node, (), logs / f"{name}-{i}.log", 2) for i in range(2)], **options
    )
    actors.create(Toy, [(0,), (1,)])
    yield actors
    left = [psutil.Process(pid) for pid in actors.pids if psutil.pid_exists(pid)]
    actors.close()
    assert psutil.wait_procs(left, timeout=LONG)[1] == []


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "logs"


@pytest.fixture(scope="module")
def toys(node, logs):
    with two_toys(node, logs, "learner") as actors:
        yield actors


@pytest.fixture
def doomed(node, tmp_path, request):
    """Two that a test may end, under a name that no others have had."""
    with two_toys(node, tmp_path, request.function.__name__) as actors:
        yield actors


@pytest.mark.slow
def test_a_private_cluster_listens_on_loopback_only(node, others):
    mine = traces()[0] - others
    listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in mine]
    assert listening
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


@pytest.mark.slow
def test_actors_answer_by_rank_under_their_names_in_the_drivers_folder(toys, logs):
    found = toys.call_all("about")
    assert [one["rank"] for one in found] == [0, 1]
    assert [one["pid"] for one in found] == toys.pids
    assert {one["folder"] for one in found} == {os.getcwd()}
    assert [one["title"] for one in found] == ["ray::learner-0.about", "ray::learner-1.about"]
    assert {one["threads"] for one in found} == {os.environ["OMP_NUM_THREADS"]}
    assert toys.call("about")["rank"] == 0
    for rank in (0, 1):
        log = (logs / f"learner-{rank}.log").read_text()
        assert f"toy {rank} is made" in log
        assert f"learner-{rank} on 127.0.0.1, process {toys.pids[rank]}" in log


@pytest.mark.slow
def test_a_value_that_is_put_is_read_in_place_by_every_actor(toys):
    column = toys.put({"x": np.ones(300_000, np.float32)})
    assert toys.call_all("total", column) == [(300_000.0, False)] * 2


@pytest.mark.slow
def test_an_error_of_all_is_raised_as_what_it_was_and_they_work_on(toys):
    with pytest.raises(KeyError, match="lost") as error:
        toys.call("fail", None, KeyError, "lost")
    assert "learner-0 on 127.0.0.1" in error.value.__notes__[0]
    assert toys.call_all("about")[1]["rank"] == 1


@pytest.mark.slow
def test_an_error_of_one_is_raised_as_what_it_was_with_its_log_and_ends_those_that_wait_for_it(doomed):
    with pytest.raises(ValueError, match="no such row") as error:
        doomed.call("fail", 1, ValueError, "no such row")
    assert str(error.value) == "no such row"
    (note,) = error.value.__notes__
    assert f"{doomed.places[1].name} on 127.0.0.1 in fail" in note
    assert f"it ended {doomed.places[0].name}" in note
    assert str(doomed.places[1].log) in note
    assert "ValueError: no such row" in doomed.places[1].log.read_text()
    with pytest.raises(ClusterError, match="have ended: no such row"):
        doomed.call("about")


@pytest.mark.slow
def test_an_error_that_cannot_travel_is_told_as_a_runtime_error(toys):
    with pytest.raises(RuntimeError, match="Unpicklable: one and two"):
        toys.call("fail", None, Unpicklable, "one", "two")


@pytest.mark.slow
def test_a_death_is_named_before_the_error_that_it_causes_elsewhere(doomed, monkeypatch):
    monkeypatch.setattr("r1_cli.cluster.actors.DEATH_SECONDS", LONG)
    with pytest.raises(ClusterError, match=f"{doomed.places[1].name} on 127.0.0.1 died in leave") as error:
        doomed.call("leave", 1)
    assert "toy 1 is made" in str(error.value)
    assert str(doomed.places[1].log) in str(error.value)


@pytest.mark.slow
def test_an_actor_that_is_stopped_while_the_others_answer_is_named_and_ends_the_call(node, tmp_path):
    with two_toys(node, tmp_path, "stopped", patience=1.0) as actors:
        with pytest.raises(
            ClusterError, match=r"stopped-1 did not answer stop within 1 seconds of the others: hung or"
        ):
            actors.call("stop", 1)
        with pytest.raises(ClusterError, match="stopped-0 and those beside it have ended"):
            actors.call("about")


@pytest.mark.slow
def test_a_start_after_a_fault_uses_the_processes_that_are_left_with_new_objects(node, tmp_path, monkeypatch):
    from r1_cli.cluster import kept_actors
    from r1_cli.cluster.actors import ActorGroup, ActorPlacement

    kept = kept_actors.KeptActors()
    places = [ActorPlacement(f"kept-{i}", node, (), tmp_path / f"logs/kept-{i}.log", 2) for i in range(2)]
    first = ActorGroup(places, kept=kept)
    first.create(Toy, [(0,), (1,)])
    part = first.split()[0]
    with pytest.raises(ClusterError, match=r"kept-1 on .* died in leave"):
        first.call("leave", 1)
    first.close()
    for group in (part, first):
        with pytest.raises((RuntimeError, ClusterError), match=r"belongs to a later start|have ended"):
            group.call("about")
    second = ActorGroup(places, kept=kept)
    second.create(LastingToy, [(0,), (1,)])
    assert second.pids[0] == first.pids[0]
    assert second.pids[1] != first.pids[1]
    assert "toy 0 is closed" in places[0].log.read_text()
    monkeypatch.setattr(kept_actors, "RESET_SECONDS", 1.0)
    second._handles[1].call.remote(False, "sleep")
    second.close()
    third = ActorGroup(places, kept=kept)
    third.create(LastingToy, [(0,), (1,)])
    assert third.pids[0] == second.pids[0]
    assert third.pids[1] != second.pids[1]
    assert third.call_all("count") == [1, 0]
    left = [psutil.Process(pid) for pid in third.pids]
    third.close()
    kept.close()
    assert psutil.wait_procs(left, timeout=LONG)[1] == []


@pytest.mark.slow
def test_an_object_is_kept_if_its_class_has_reset_and_its_request_is_the_same(node, capsys):
    from r1_cli.cluster.actors import ActorProcess

    process = ActorProcess()
    counts = []
    for kind, rank in ((LastingToy, 0), (LastingToy, 0), (LastingToy, 1), (Toy, 1), (Toy, 1)):
        process.create(kind, rank)
        process.reset()
        counts.append(getattr(process.held, "resets", None))
    assert counts == [1, 2, 1, None, None]
    assert capsys.readouterr().out.count("is closed") == 4


@pytest.mark.slow
def test_a_process_that_dies_at_its_start_is_started_once_more(node, tmp_path, monkeypatch, caplog):
    from r1_cli.cluster import actors as module

    class DiesAtFirst(module.ActorProcess):
        def begin(self, place, *args):
            marker = place.log.parent / "started"
            if place.name == "late-1" and not marker.exists():
                marker.touch()
                os._exit(9)
            return super().begin(place, *args)

    monkeypatch.setattr(module, "ActorProcess", DiesAtFirst)
    with two_toys(node, tmp_path, "late") as actors:
        assert [one["rank"] for one in actors.call_all("about")] == [0, 1]
    (told,) = [record.message for record in caplog.records if "Starting it again" in record.message]
    assert re.search(r"late-\d on 127\.0\.0\.1 died in start", told)
    note_fault("a rank or engine that dies while it starts", outcome="goes on")


@pytest.mark.slow
def test_a_value_that_is_lost_is_told_by_who_had_it(doomed):
    first, second = doomed.split()
    value = first.call("put_down", doomed.remote_put)
    assert second.call("total", value) == (499999500000.0, False)
    other = first.call("put_down", doomed.remote_put)
    first.close()

    def lost() -> bool:  # Ray takes a moment to see it
        with suppress(ClusterError):
            second.call("total", other)
            return False
        return True

    assert eventually(lost)
    with pytest.raises(ClusterError, match=rf"{re.escape(str(doomed.places[0]))} is gone, and with it what was to be"):
        second.call("total", other)


@pytest.mark.slow
def test_a_folder_that_a_machine_does_not_see_is_named_with_it(node, tmp_path):
    from r1_cli.cluster.actors import ActorGroup, ActorPlacement

    (tmp_path / "logs").write_text("a file")
    with pytest.raises(ClusterError, match=r"every machine must see .*logs.* lost on 127\.0\.0\.1 in start"):
        ActorGroup([ActorPlacement("lost", node, (), tmp_path / "logs/lost.log")])


def test_too_many_gpus_are_refused_before_ray_starts():
    before = traces()
    with (
        pytest.raises(ConfigError, match=r"n_gpus_per_node=4 .* 127\.0\.0\.1 2"),
        open_cluster(TrainerConfig(n_gpus_per_node=4), Hardware("cuda", ("0", "1"))),
    ):
        pass
    assert all(now <= then for now, then in zip(traces(), before, strict=True))


def test_machines_with_other_software_are_named():
    own = {"Python": "3.11.1", "torch": "2.13.0"}
    same = {"address": "10.0.0.1", "versions": own}
    other = {"address": "10.0.0.2", "versions": own | {"torch": "2.11.0"}}
    require_same_versions([same, same], own)
    with pytest.raises(ClusterError, match=r"10\.0\.0\.2 has torch 2\.11\.0, this machine 2\.13\.0"):
        require_same_versions([same, other], own)
    assert {"r1-cli", "torch", "transformers", "Python"} <= own_versions().keys()
