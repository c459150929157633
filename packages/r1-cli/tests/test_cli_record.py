"""The record: what it holds of a step, that it is whole or not there, its bound, and what it does on a full disk."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from r1_cli.runs import manifest
from r1_cli.runs.reader import MANIFEST_FILE, MEDIA, SAMPLES, RunReader
from r1_cli.runs.schema import SCHEMA
from r1_cli.train.groups.group import Group, Response, to_samples
from r1_cli.train.recorder import MediaFolder, Recorder
from r1_core.types import Sample, with_tokens
from r1_data.types import Prompt
from r1_rewards.types import Failure, Score
from r1_rollout.types import Completion

GB = 10**9


def prompt(number: int = 0, **more: Any) -> Prompt:
    ids = [5, 6, 7]
    return Prompt(f"rows.parquet:{number}", "How many?", ids, ids, torch.arange(3)[None], "3", source="shapes", **more)


def response(length: int = 2, score: Score | None = None, text: str = "two") -> Response:
    score = score or Score(0.5, {"accuracy": 0.0, "format": 1.0}, extracted="2", reason="not the same number")
    logprobs = -0.5 * np.arange(1, length + 1, dtype=np.float32)
    return Response(Completion(np.arange(length), logprobs, "stop", 7), text, score, score.value - 0.25)


def step(groups: int = 2, **more: Any) -> list[Group]:
    return [Group(prompt(number, **more), [response(2), response(3)]) for number in range(groups)]


def learned(groups: list[Group]) -> list[Sample]:
    """The samples of groups as they are after an update."""
    samples = to_samples(groups)
    trained = sum(sample.response_length for sample in samples)
    return with_tokens(samples, old_logprobs=torch.full((trained,), -0.25), advantages=torch.arange(trained).float())


def record(folder: Path, number: int, groups: list[Group], samples: Any = (), most: int = GB, **more: Any) -> Recorder:
    recorder = Recorder(folder, most)
    recorder.record(number, more.get("phase", "train"), groups, samples)
    recorder.flush()
    return recorder


def picture(shade: int, side: int = 8) -> Image.Image:
    return Image.new("RGB", (side, side), (shade, 0, 0))


def test_a_row_holds_what_was_asked_said_scored_and_learned(tmp_path: Path) -> None:
    groups = step()
    record(tmp_path, 12, groups, learned(groups))
    assert RunReader(tmp_path).recorded_steps() == [12]
    rows = RunReader(tmp_path).samples(12)
    assert [(row["group"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rows[1] == {
        "step": 12, "phase": "train", "group": 0, "sample": 1, "prompt_id": "rows.parquet:0", "source": "shapes",
        "prompt": "How many?", "answer": "two", "ground_truth": "3", "media": [], "prompt_tokens": [5, 6, 7],
        "tokens": [0, 1, 2], "rollout_logprobs": [-0.5, -1.0, -1.5], "old_logprobs": [-0.25] * 3, "entropies": None,
        "ref_logprobs": None,
        "teacher_logprobs": None, "teacher_top": None, "teacher_top_ids": None,
        "advantages": [2.0, 3.0, 4.0], "score": 0.5, "reward": 0.25, "parts": {"accuracy": 0.0, "format": 1.0},
        "extracted": "2", "reason": "not the same number", "failure": None, "finish_reason": "stop",
        "weight_version": 7, "sampled": None, "turns": None, "stop_reason": None, "episode": None,
    }  # fmt: skip
    assert list(rows[0]) == SCHEMA.names


def test_a_teachers_likely_tokens_are_lists_for_each_token(tmp_path: Path) -> None:
    samples = with_tokens(
        learned(step()), teacher_top=-torch.arange(20.0).view(10, 2), teacher_top_ids=torch.arange(20).view(10, 2).int()
    )
    record(tmp_path, 3, step(), samples)
    rows = RunReader(tmp_path).samples(3)
    assert rows[1]["teacher_top"] == [[-4.0, -5.0], [-6.0, -7.0], [-8.0, -9.0]]
    assert rows[3]["teacher_top_ids"] == [[14, 15], [16, 17], [18, 19]]


def test_a_validation_has_no_fields_of_the_learner(tmp_path: Path) -> None:
    record(tmp_path, 0, step(), phase="validation")
    assert RunReader(tmp_path).recorded_steps() == []
    (row, *_) = RunReader(tmp_path).samples(0, "validation", ["tokens", "old_logprobs", "advantages"])
    assert row == {"tokens": [0, 1], "old_logprobs": None, "advantages": None}


def test_odd_answers_are_recorded_as_they_are(tmp_path: Path) -> None:
    failed = Score(math.nan, {"accuracy": math.inf}, Failure("exception", "KeyError: 'x'"))
    odd = [response(0, text=""), response(1, failed, text="\ud800 \x00 <script>"), response(1, text="漢" * 10**6)]
    group = Group(replace(prompt(), text="", ground_truth="\udfff"), odd, truth_problem="no number")
    record(tmp_path, 1, [group])
    rows = RunReader(tmp_path).samples(1)
    assert [row["tokens"] for row in rows] == [[], [0], [0]]
    assert math.isnan(rows[1]["score"])
    assert rows[1]["parts"] == {"accuracy": math.inf}
    assert rows[1]["failure"] == "exception: KeyError: 'x'"
    assert rows[1]["answer"] == "? \x00 <script>"
    assert rows[1]["reason"] == "no number"
    assert len(rows[2]["answer"]) == 10**6
    record(tmp_path, 2, [])
    assert RunReader(tmp_path).samples(2) == []


def test_pictures_are_kept_once_and_are_what_the_model_saw(tmp_path: Path) -> None:
    groups = [Group(prompt(i, images=(picture(i % 2), picture(9))), [response()]) for i in range(4)]
    record(tmp_path, 1, groups)
    files = [row["media"] for row in RunReader(tmp_path).samples(1, columns=["media"])]
    assert files[0] == files[2] != files[1] == files[3]
    assert {path.name for path in (tmp_path / MEDIA).iterdir()} == {name for names in files for name in names}
    with Image.open(tmp_path / MEDIA / files[1][0]) as found:
        assert found.convert("RGB").tobytes() == picture(1).tobytes()


@pytest.mark.parametrize(("frames", "kept"), [(1, 1), (4, 4), (100, 16)])
def test_a_videos_frames_are_kept_in_a_file(tmp_path: Path, frames: int, kept: int) -> None:
    shades = torch.linspace(0, 255, frames).to(torch.uint8)
    video = shades[:, None, None, None].expand(-1, 3, 16, 16)
    (name,) = MediaFolder(tmp_path).save(prompt(videos=(video,)))
    with Image.open(tmp_path / name) as found:
        assert getattr(found, "n_frames", 1) == kept
        assert found.size == (16, 16)


def test_a_step_that_is_reached_again_replaces_its_file(tmp_path: Path) -> None:
    record(tmp_path, 3, step(4))
    record(tmp_path, 3, step(1))
    assert len(RunReader(tmp_path).samples(3)) == 2
    assert [path.name for path in (tmp_path / SAMPLES).iterdir()] == ["000000003-train.parquet"]


def test_the_oldest_steps_leave_with_the_pictures_that_nothing_else_shows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def groups(number: int) -> list[Group]:
        noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)
        return step(2, images=(picture(1), Image.fromarray(noise)))

    one = record(tmp_path / "one", 1, groups(1))
    one.close()
    size = sum(path.stat().st_size for path in (tmp_path / "one").rglob("*.*"))
    recorder = Recorder(tmp_path / "all", most=4 * size)
    with caplog.at_level(logging.WARNING, "r1"):
        for number in range(1, 31):
            recorder.record(number, "train", groups(number))
        recorder.flush()
    files = list((tmp_path / "all").rglob("*.*"))
    assert sum(path.stat().st_size for path in files) <= 4 * size
    steps = RunReader(tmp_path / "all").recorded_steps()
    assert steps == list(range(steps[0], 31))
    assert 2 <= len(steps) <= 5
    shown = {name for number in steps for row in RunReader(tmp_path / "all").samples(number) for name in row["media"]}
    assert {path.name for path in (tmp_path / "all" / MEDIA).iterdir()} == shown
    assert caplog.text.count("trainer.record_gb") == 1


def test_what_is_larger_than_the_bound_by_itself_stays(tmp_path: Path) -> None:
    record(tmp_path, 1, step(), most=1)
    record(tmp_path, 2, step(), most=1)
    assert RunReader(tmp_path).recorded_steps() == [2]


def test_nothing_is_recorded_where_nothing_may_be(tmp_path: Path) -> None:
    record(tmp_path, 1, step(), most=0).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "recorded"), [(OSError(28, "No space left on device"), [1, 3, 4, 5]), (KeyError("x"), [1])]
)
def test_samples_wait_for_a_full_disk_and_are_off_after_another_error_which_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception,
    recorded: list[int],
) -> None:  # fmt: skip
    def fail(*_: Any, **__: Any) -> None:
        raise error

    recorder = record(tmp_path, 1, step())
    with caplog.at_level(logging.WARNING, "r1"), monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", fail)
        for number in (2, 3, 4):
            recorder.record(number, "train", step())
            recorder.flush()
    recorder.record(5, "train", step())
    recorder.close()
    assert caplog.text.count("could not be written") == 1
    assert ("2-train.parquet is lost" in caplog.text) == (len(recorded) > 1)
    assert RunReader(tmp_path).recorded_steps() == recorded, "what is there is whole"


def test_what_is_asked_for_and_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"step 4 is not in the record \(train\); none is"):
        RunReader(tmp_path).sample_table(4)
    record(tmp_path, 1, step())
    with pytest.raises(FileNotFoundError, match="steps 1 to 1 are"):
        RunReader(tmp_path).sample_table(4)
    with pytest.raises(KeyError, match="no column 'token'"):
        RunReader(tmp_path).samples(1, columns=["token"])


CONFIG = {"data": {"seed": 1}, "worker": {"rollout": {"seed": 2}}}


def test_a_manifest_tells_of_every_start_and_how_it_ended(tmp_path: Path) -> None:
    with manifest.record_start(tmp_path, CONFIG, {"train": "abc"}, ["cpu"], step=0):
        (running,) = RunReader(tmp_path).starts()
        assert (running["end"], running["ended"]) == ("is running, or was killed", None)
    with pytest.raises(RuntimeError), manifest.record_start(tmp_path, CONFIG, {"train": "abc"}, ["0", "1"], step=3):
        raise RuntimeError("a rank is gone\nand more")
    with manifest.record_start(tmp_path, CONFIG, {}, [], step=5) as start:
        start["end"] = "left after step 7, by a signal"
    starts = RunReader(tmp_path).starts()
    assert [start["end"] for start in starts] == [
        "complete", "RuntimeError: a rank is gone", "left after step 7, by a signal",
    ]  # fmt: skip
    assert [start["from_step"] for start in starts] == [0, 3, 5]
    assert starts[0]["seeds"] == {"data": 1, "rollout": 2}
    assert starts[0]["packages"]["torch"].startswith("2.")
    assert starts[1]["host"]["devices"] == ["0", "1"]
    assert all(start["ended"] >= start["began"] for start in starts)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"starts": null}'])
def test_a_manifest_that_cannot_be_read_is_begun_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST_FILE).write_text(content)
    with manifest.record_start(tmp_path, CONFIG, {}, [], step=0):
        pass
    assert len(RunReader(tmp_path).starts()) == 1


def test_secrets_of_a_command_are_hidden() -> None:
    words = [
        "r1", "train", "trainer.max_steps=3", "worker.reward.reward_function_kwargs.api_key=sk-1",
        'worker.reward.reward_function_kwargs={"judge": {"api_key": "sk-2"}}', "+x.my_token=sk-3", "a.tokenizer=path",
        "data.max_prompt_tokens=5", "HF_TOKEN=sk-4",
    ]  # fmt: skip
    shown = manifest.hide_secrets(words)
    assert "sk-" not in shown
    for kept in ("trainer.max_steps=3", "a.tokenizer=path", "data.max_prompt_tokens=5"):
        assert kept in shown
