"""What `r1 view` serves: curves and samples as JSON, to those who may ask, and nothing else of the disk."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_pages import (
    HOSTILE,
    LATER,
    PICTURE,
    turn,
    write_episodes,
    write_log,
    write_run,
    write_samples,
    write_tokenizer,
)
from click.testing import CliRunner

from r1_cli.main import main
from r1_cli.runs.conversation import prompt_media, read_turns
from r1_cli.runs.history import find_log
from r1_cli.runs.reader import RunReader
from r1_cli.runs.view.app import build_app, names_of
from r1_cli.runs.view.guard import LOOPBACK, allowed_hosts
from r1_cli.runs.view.index import Indexer

pytest.importorskip("starlette", reason="r1-cli[view] is not installed")


def client_of(*runs: Path, token: str | None = None, host: str = "127.0.0.1:6010") -> Any:
    from starlette.testclient import TestClient

    app = build_app(runs, token, LOOPBACK)
    return TestClient(app, base_url=f"http://{host}", follow_redirects=False)


def test_curves_come_as_they_are_appended(tmp_path: Path) -> None:
    write_log(tmp_path, 2)
    client, log = client_of(tmp_path), tmp_path / "experiment_log.jsonl"
    page = client.get("/api/curves?run=0").json()
    assert [row["step"] for row in page["rows"]] == [1, 2]
    with log.open("a") as file:
        file.write('{"step": 3, "loss": NaN, "name": "x", "big": 1e999}\nnot json\n[1]\n{"a": 1}\n{"step": 4, "lo')
    page = client.get(f"/api/curves?run=0&after={page['next']}").json()
    assert page["rows"] == [{"step": 3, "loss": None, "big": None}]
    with log.open("a") as file:
        file.write('ss": 0.5}\n')
    page = client.get(f"/api/curves?run=0&after={page['next']}").json()
    assert page["rows"] == [{"step": 4, "loss": 0.5}]
    evaluated = tmp_path / "evaluations.jsonl"  # later, of an earlier step, by a process of its own
    evaluated.write_text('{"step": 2, "eval/a/chat/avg@1": 0.5, "warnings": []}\n{"step": 3, "ev')
    page = client.get(f"/api/curves?run=0&after={page['next']}").json()
    assert (page["rows"], page["times"]) == ([{"step": 2, "eval/a/chat/avg@1": 0.5}], 0)
    with log.open("a") as file:
        file.write('{"step": 5, "loss": 0.25}\n')
    page = client.get(f"/api/curves?run=0&after={page['next']}").json()
    assert page["rows"] == [{"step": 5, "loss": 0.25}]
    write_log(tmp_path, 1)
    anew = client.get(f"/api/curves?run=0&after={page['next']}").json()
    assert [row["step"] for row in anew["rows"]] == [1, 2]
    assert anew["times"] == 1
    evaluated.unlink()
    anew = client.get(f"/api/curves?run=0&after={anew['next']}&times=1").json()
    assert ([row["step"] for row in anew["rows"]], anew["times"]) == ([1], 2)


def test_a_teachers_log_probs_come_without_its_likely_tokens(tmp_path: Path) -> None:
    path = RunReader(write_run(tmp_path)).sample_path(1)
    table = pq.read_table(path, partitioning=None)
    wide = pa.array([[[-1.0] * 32]] * len(table), pa.list_(pa.list_(pa.float32())))
    numbers = pa.array([[-0.5, float("nan")]] * len(table), pa.list_(pa.float32()))
    for name, values in (("teacher_top", wide), ("teacher_logprobs", numbers)):
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, values)
    pq.write_table(table, path)
    rows = client_of(tmp_path).get("/api/group?run=0&step=1&group=1").json()
    assert [row["teacher_logprobs"] for row in rows] == [[-0.5, None]] * len(rows)
    assert rows
    assert "teacher_top" not in rows[0]


def test_turns_of_an_episode_come_with_their_pictures_in_order(tmp_path: Path) -> None:
    client = client_of(write_episodes(tmp_path / "a"))
    row = client.get("/api/group", params={"run": "0", "step": 1, "group": 0}).json()[0]
    assert row["prompt_media"] == [PICTURE]
    assert [(turn["role"], turn["begin"], turn["end"]) for turn in row["turns"]] == [
        ("assistant", 0, 4), ("environment", 4, 8), ("assistant", 8, 10), ("environment", 10, 10),
    ]  # fmt: skip
    assert row["turns"][1]["parts"] == [{"text": "Here it is:"}, {"media": LATER}]
    assert [call["error"] for call in row["turns"][1]["calls"]] == ["", "no such part"]
    single = client_of(write_run(tmp_path / "b")).get("/api/group", params={"run": "0", "step": 1, "group": 0}).json()
    assert single[0]["turns"] is None
    assert single[0]["prompt_media"] == [PICTURE]


def test_pictures_that_were_not_read_or_not_recorded_have_no_file() -> None:
    picture = [{"role": "user", "content": [{"type": "image"}]}]
    turns = [turn("environment", 0, 3, picture), turn("environment", 3, 3, picture)]
    for media, prompt, first in (([PICTURE, LATER], [PICTURE], LATER), (None, [], None)):
        row = {"media": media, "turns": turns}
        told = read_turns(row)
        assert prompt_media(row) == prompt
        assert told is not None
        assert [one["parts"] for one in told] == [[{"media": first}], [{"media": None}]]


def test_groups_are_sorted_filtered_searched_and_paged(tmp_path: Path) -> None:
    client = client_of(write_run(tmp_path / "a", steps=2))

    def ask(**asked: Any) -> Any:
        return client.get("/api/groups", params={"run": "0", **asked}).json()

    def count(**asked: Any) -> tuple[int, int]:
        found = ask(**asked)
        return found["groups"], found["answers"]

    assert count() == (6, 24)
    assert count(step=2) == (3, 12)
    assert count(filters="flat") == (2, 8)
    assert count(filters="truncated") == (6, 6)
    assert count(filters="failed") == (2, 2)
    assert count(filters="failed,truncated") == (0, 0)
    assert count(search="SAYS 11") == (2, 2)
    assert count(search="1 plus 1") == (2, 8)
    assert count(low=2, high=2) == (4, 4)
    assert count(source="elsewhere") == (0, 0)
    assert ask()["scale"] == [0, 3]
    best = ask(sort="score", down=1, count=1)["rows"][0]
    assert (best["group"], best["mean"], best["score"]) == (2, pytest.approx(5 / 3), [0, None, 2, 3])
    assert ask(sort="score", count=1)["rows"][0]["group"] == 0
    widest = ask(sort="spread", down=1, count=1)["rows"][0]
    assert widest["spread"] == pytest.approx(np.std([0, 2, 3]))
    assert ask(sort="length", down=1, count=1)["rows"][0]["length"] == 12
    everything = ask(count=500)["rows"]
    assert ask(begin=1, count=3)["rows"] == everything[1:4]
    assert ask(begin=9999)["rows"] == []


def test_a_listed_group_has_its_question_and_the_words_that_were_searched_for(tmp_path: Path) -> None:
    client = client_of(write_run(tmp_path / "a", steps=1))
    row = client.get("/api/groups", params={"run": "0", "search": "says 6"}).json()["rows"][0]
    assert row["question"] == "What is 1 plus 1?"  # without what all prompts of the step end with
    assert (row["media"], row["pictures"]) == (PICTURE, 1)
    assert "says 6." in row["excerpt"]
    assert row["hit"] == [False, False, True, False]
    parts = client.get("/api/group?run=0&step=1&group=1").json()[0]["messages"][0]["parts"]
    assert parts == [{"media": PICTURE}, {"text": "What is 1 plus 1? "}, {"text": HOSTILE, "common": True}]


def test_long_answers_come_short_and_in_full_when_asked_for(tmp_path: Path) -> None:
    path = RunReader(write_run(tmp_path, steps=1)).sample_path(1)
    table = pq.read_table(path, partitioning=None)
    answers = ["\u05e9\u05dc\u05d5\u05dd " * 40_000, *table["answer"].to_pylist()[1:]]
    pq.write_table(table.set_column(table.column_names.index("answer"), "answer", pa.array(answers)), path)
    client = client_of(tmp_path)
    rows = client.get("/api/group?run=0&step=1&group=0").json()
    assert [row["cut"] for row in rows] == [True, False, False, False]
    assert (rows[0]["characters"], len(rows[0]["answer"])) == (200_000, 20_000)
    (whole,) = client.get("/api/group?run=0&step=1&group=0&place=0").json()
    assert whole["answer"] == answers[0]
    assert not whole["cut"]


def test_a_picture_that_was_not_kept_has_no_name(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1)
    (run / "media" / PICTURE).unlink()
    assert client_of(run).get("/api/group?run=0&step=1&group=1").json()[0]["messages"][0]["parts"][0] == {"media": None}


def test_what_was_read_of_many_files_is_kept_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    for step in range(1, 23):
        write_samples(run, step, groups=1, each=2)
    first = client_of(run).get("/api/groups?run=0&count=500").json()
    read: list[int] = []
    whole = Indexer._read_file

    def reading(indexer: Indexer, step: int) -> Any:
        read.append(step)
        return whole(indexer, step)

    monkeypatch.setattr(Indexer, "_read_file", reading)
    (kept,) = (tmp_path / "cache").rglob("*.parquet")
    assert client_of(run).get("/api/groups?run=0&count=500").json() == first
    assert read == []
    draft = tmp_path / "again"
    write_samples(draft, 7, groups=2, each=2)
    (draft / "samples" / "000000007-train.parquet").replace(run / "samples" / "000000007-train.parquet")
    assert client_of(run).get("/api/groups?run=0").json()["groups"] == first["groups"] + 1
    assert read == [7]
    kept.write_bytes(b"PAR1 damaged PAR1")
    assert client_of(run).get("/api/groups?run=0").json()["groups"] == first["groups"] + 1


def test_a_group_has_texts_parts_and_pictures_and_its_prompt_in_other_runs(tmp_path: Path) -> None:
    client = client_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=1))
    rows = client.get("/api/group?run=1&step=1&group=1").json()
    assert [row["sample"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["parts"] == {"accuracy": 1.0, HOSTILE: 0.5}
    same = client.get("/api/same", params={"prompt_id": rows[0]["prompt_id"]}).json()
    assert [(one["run"], one["step"], one["score"]) for one in same] == [
        (0, 1, 1.5),
        (0, 2, 1.5),
        (0, 3, 1.5),
        (1, 1, 1.5),
    ]
    assert client.get("/api/group?run=0&step=99&group=0").json() == []
    picture = client.get(f"/media/0/{PICTURE}")
    assert (picture.status_code, picture.headers["content-type"]) == (200, "image/png")


def test_tokens_have_their_texts_where_the_runs_tokenizer_is_known(tmp_path: Path) -> None:
    bare = write_run(tmp_path / "bare", steps=1)
    assert client_of(bare).get("/api/group?run=0&step=1&group=1").json()[0]["pieces"] is None
    (bare / "experiment_config.json").write_text('{"worker": {"actor": {"model": {"model_path": "gone"}}}}')
    assert client_of(bare).get("/api/group?run=0&step=1&group=1").json()[0]["pieces"] is None
    write_tokenizer(tmp_path / "bare")
    pieces = client_of(bare).get("/api/group?run=0&step=1&group=1").json()[0]["pieces"]
    assert pieces[2:6] == ["word2 ", HOSTILE, "\n", "word5 "]
    (bare / "global_step_2" / "actor" / "tokenizer.json").write_text("not a tokenizer")
    assert client_of(bare).get("/api/group?run=0&step=1&group=1").json()[0]["pieces"] is None


def test_steps_that_are_written_replaced_or_dropped_while_it_serves_are_seen(tmp_path: Path) -> None:
    write_samples(tmp_path, 1)
    client = client_of(tmp_path)
    assert client.get("/api/runs").json()[0]["train"] == [1]
    write_samples(tmp_path, 2)
    (tmp_path / "samples" / ".draft_000000003-train.parquet").write_bytes(b"half")
    (tmp_path / "samples" / "000000004-train.parquet").write_bytes(b"no parquet")
    assert client.get("/api/runs").json()[0]["train"] == [1, 2]
    assert client.get("/api/groups?run=0").json()["answers"] == 24
    draft = tmp_path / "again"
    write_samples(draft, 2, groups=1)
    (draft / "samples" / "000000002-train.parquet").replace(tmp_path / "samples" / "000000002-train.parquet")
    assert client.get("/api/groups?run=0&step=2").json()["answers"] == 4
    (tmp_path / "samples" / "000000001-train.parquet").unlink()
    assert client.get("/api/runs").json()[0]["train"] == [2]


def test_an_empty_folder_is_a_run_without_steps(tmp_path: Path) -> None:
    client = client_of(tmp_path)
    state = {"state": "waiting", "told": "nothing is written there yet"}
    no_steps: dict[str, list[int]] = {phase: [] for phase in ("train", "validation", "sample", "sft")}
    assert client.get("/api/runs").json() == [{"name": tmp_path.name, "folder": str(tmp_path), **state, **no_steps}]
    assert client.get("/api/curves?run=0").json() == {"rows": [], "next": 0, "times": 0}
    nothing = {"groups": 0, "answers": 0, "scale": None, "sources": [], "rows": []}
    assert client.get("/api/groups?run=0").json() == nothing
    assert client.get("/api/same?prompt_id=x").json() == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("curves?run=7", "run is '7'"),
        ("curves", "run is None"),
        ("curves?run=0&after=x", "after is 'x'"),
        ("groups?run=0&filters=odd", "filters has 'odd'"),
        ("groups?run=0&sort=prompt", "sort is 'prompt'"),
        ("groups?run=0&phase=../x", "phase is '../x'"),
        ("groups?run=0&low=nan", "low is 'nan'"),
    ],
)
def test_what_cannot_be_answered_is_said(tmp_path: Path, asked: str, words: str) -> None:
    answer = client_of(tmp_path).get(f"/api/{asked}")
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    assert words in answer.json()["error"]


def test_no_path_of_a_request_leads_out_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    link = "f" * 32 + ".png"
    (run / "media" / link).symlink_to(secret)
    client = client_of(run)
    names = ["../../secret.png", "..%2f..%2fsecret.png", "%2e%2e/experiment_log.jsonl", "x.png", link, PICTURE + "%00"]
    for path in [*(f"/media/0/{name}" for name in names), f"/media/9/{PICTURE}", "/assets/../app.py", "/../app.py"]:
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert b"secret" not in answer.content


def test_only_those_with_the_token_are_answered(tmp_path: Path) -> None:
    client = client_of(write_run(tmp_path / "a", steps=1), token="right" * 5)
    for path in ("/", "/api/runs", f"/media/0/{PICTURE}", "/?token=wrong", "/?token=%ff"):
        assert client.get(path).status_code == 401, path
    assert client.get("/api/runs", headers={"authorization": "Bearer " + "right" * 5}).status_code == 200
    entered = client.get("/?token=" + "right" * 5)
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert all(word in entered.headers["set-cookie"] for word in ("HttpOnly", "SameSite=Strict"))
    assert client.get("/api/runs").status_code == 200


def test_other_names_and_methods_are_refused(tmp_path: Path) -> None:
    client = client_of(tmp_path)
    for host in ("evil.example", "evil.example:6010", "127.0.0.1.evil.example", ""):
        assert client.get("/api/runs", headers={"host": host}).status_code == 421, host
    for host in ("localhost:6010", "127.0.0.1", "[::1]:6010", "[::1]", "LOCALHOST"):
        assert client.get("/api/runs", headers={"host": host}).status_code == 200, host
    assert client.post("/api/runs").status_code == 405
    assert allowed_hosts("0.0.0.0") is None
    assert "10.0.0.5" in (allowed_hosts("10.0.0.5") or ())


def test_answers_are_json_and_the_page_runs_no_script_but_its_own(tmp_path: Path) -> None:
    client = client_of(write_run(tmp_path / HOSTILE.replace("/", ""), steps=1))
    for path in ("/api/runs", "/api/groups?run=0&search=says", "/api/group?run=0&step=1&group=1"):
        answer = client.get(path)
        assert "onerror" in answer.text
        assert answer.headers["content-type"] == "application/json"
        json.loads(answer.text)
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "onerror" not in page.text
    assert page.text.count("<script") == page.text.count('<script type="module" crossorigin src="/assets/')


def test_runs_are_named_apart(tmp_path: Path) -> None:
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert names_of([tmp_path / "a", tmp_path / "a"]) == ["a", "a"]


def test_the_command_prints_an_address_with_a_token_where_others_can_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run(server: Any, sockets: list[socket.socket]) -> None:
        started.append(sockets[0].getsockname()[0])
        sockets[0].close()

    monkeypatch.setattr("uvicorn.Server.run", run)
    port = str(free_port())
    alone = CliRunner().invoke(main, ["view", str(tmp_path), "--port", port])
    assert alone.output == f"http://127.0.0.1:{port}/\n"
    shared = CliRunner().invoke(main, ["view", str(tmp_path), "--host", "0.0.0.0", "--port", port])
    assert shared.output.startswith(f"http://0.0.0.0:{port}/?token=")
    assert len(shared.output.split("token=")[1].strip()) >= 32
    assert started == ["127.0.0.1", "0.0.0.0"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_a_port_in_use_is_named_before_any_address_is_printed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = CliRunner().invoke(main, ["view", str(tmp_path), "--port", str(port)])
    assert told.exit_code == 2
    assert "http://" not in told.output
    assert f"--host 127.0.0.1 --port {port} (" in told.output
    assert "in use" in told.output


def test_a_run_that_has_not_written_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: sockets[0].close())
    told = CliRunner().invoke(main, ["view", str(tmp_path / "later"), "--port", str(free_port())])
    assert told.exit_code == 0
    assert f"{tmp_path / 'later'} does not exist yet" in told.stderr
    client = client_of(tmp_path / "later")
    assert client.get("/api/runs").json()[0]["state"] == "waiting"
    write_run(tmp_path / "later", steps=2)
    assert [row["step"] for row in client.get("/api/curves?run=0").json()["rows"]] == [1, 2]
    assert client.get("/api/runs").json()[0]["train"] == [1, 2]


def test_a_run_is_live_finished_stopped_or_silent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    client = client_of(run)

    def state(ended: str | None, end: str) -> tuple[str, str]:
        (run / "manifest.json").write_text(json.dumps({"starts": [{"ended": ended, "end": end}]}))
        if ended is None and end == "killed":
            for path in (run / "manifest.json", run / "experiment_log.jsonl", run / "samples"):
                os.utime(path, (time.time() - 3600,) * 2)
        found = client.get("/api/runs").json()[0]
        return found["state"], found["told"]

    assert state(None, "is running, or was killed") == ("live", "")
    assert state("2026-01-01T00:00:00+00:00", "complete") == ("finished", "")
    assert state("2026-01-01T00:00:00+00:00", "ValueError: x") == ("stopped", "ValueError: x")
    assert state(None, "killed") == ("silent", "nothing written for 60 minutes; it may have been killed")
    with (run / "experiment_log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "timing_s/step": 3000.0}) + "\n")
    os.utime(run / "experiment_log.jsonl", (time.time() - 3600,) * 2)
    assert client.get("/api/runs").json()[0]["state"] == "live"  # a step takes 50 minutes


def write_foreign_log(folder: Path, writer: str) -> Path:
    """Write two steps as another trainer does, the second of them not finite; return what `r1 view` is given."""
    scores = [0.25, float("nan")]
    if writer == "trl":
        history = [{"step": step, "reward": score, "loss": 0.5} for step, score in enumerate(scores, 1)]
        (folder / "checkpoint-2").mkdir()
        (folder / "checkpoint-2/trainer_state.json").write_text(json.dumps({"log_history": history}))
        return folder
    rows: list[dict[str, Any]] = [
        {"step": step, "reward": {"overall": score}, "actor": {"pg": {"loss": 0.5}}, "note": "x"}
        for step, score in enumerate(scores, 1)
    ]
    path = folder / "experiment_log.jsonl"
    if writer == "verl":
        rows = [{"step": step, "data": {"critic/score/mean": score}} for step, score in enumerate(scores, 1)]
        path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder if writer == "easyr1" else path


@pytest.mark.parametrize(("writer", "more"), [("easyr1", {"actor/pg/loss": 0.5}), ("verl", {}), ("trl", {"loss": 0.5})])
def test_logs_of_other_trainers_are_charted_under_r1s_names(
    tmp_path: Path, writer: str, more: dict[str, float]
) -> None:
    path = write_foreign_log(tmp_path, writer)
    client = client_of(path)
    page = client.get("/api/curves?run=0").json()
    assert page["rows"] == [
        {"step": step, "reward/overall": score} | more for step, score in enumerate([0.25, None], 1)
    ]
    assert client.get(f"/api/curves?run=0&after={page['next']}").json()["rows"] == []
    assert client.get("/api/overview?run=0").json()["step"] == 2
    os.utime(find_log(path), (0, 0))
    [run] = client.get("/api/runs").json()
    assert (run["state"], "does not tell how its run ended" in run["told"], run["train"]) == ("silent", True, [])


def test_trls_file_is_read_again_when_it_is_written_anew(tmp_path: Path) -> None:
    client = client_of(write_foreign_log(tmp_path, "trl"))
    page = client.get("/api/curves?run=0").json()
    state = tmp_path / "checkpoint-2/trainer_state.json"
    state.write_text(json.dumps({"log_history": [{"step": 3, "reward": 1.0}]}))
    os.utime(state, ns=(1, 1))
    anew = client.get(f"/api/curves?run=0&after={page['next']}").json()
    assert (anew["rows"], anew["times"]) == ([{"step": 3, "reward/overall": 1.0}], 1)
    state.write_text('{"log_history": [{"st')
    assert client.get(f"/api/curves?run=0&after=0&times={anew['times']}").json() == anew
