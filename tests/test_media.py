"""Text, images and videos in one run: engine and learner see the same, packed or padded."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import av
import families
import numpy as np
import pyarrow.parquet as pq
import pytest
from endtoend import QUICKSTART, R1, ROOT, SHORT, read_log
from PIL import Image
from transformers import Qwen2VLImageProcessor

from r1_data import vision

MIXED = [
    *SHORT, "trainer.max_steps=2", "data.val_files=null", "trainer.val_before_train=false", "trainer.val_freq=-1",
    "trainer.save_freq=-1", "data.max_prompt_length=400", "data.prompt_key=problem", "data.video_max_frames=4",
    "data.rollout_batch_size=8", "worker.actor.global_batch_size=4", "data.shuffle=false",
]  # fmt: skip
VARIETY = """
def compute_score(reward_inputs):
    return [{"overall": len(set(item["response"])) / 20} for item in reward_inputs]
"""


def film(folder: Path) -> str:
    path = folder / "film.mp4"
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 112, 84, "yuv420p"
        for level in range(0, 240, 20):
            frame = np.full((84, 112, 3), level, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        container.mux(stream.encode())
    return path.name


def write_rows(folder: Path) -> Path:
    """A text row, one with a picture, one with three, two with videos, one with both, and two that are broken."""
    pictures = pq.read_table(ROOT / "examples/quickstart/train.parquet").to_pylist()[:3]
    for number, row in enumerate(pictures):
        Image.open(io.BytesIO(row["images"][0]["bytes"])).save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:60])
    (folder / "empty.mp4").touch()
    question, names, video = pictures[0]["problem"].replace("<image>", ""), ["0.png", "1.png", "2.png"], film(folder)
    rows = [
        {"problem": question},
        {"problem": f"<image>{question}", "images": names[:1]},
        {"problem": f"<image><image>{question}<image>", "images": names},
        {"problem": f"<video>{question}", "videos": [video]},
        {"problem": f"<video>{question}", "videos": [names]},
        {"problem": f"<video>{question}<image>", "images": names[1:2], "videos": [video]},
        {"problem": question},
        {"problem": f"<image>{question}", "images": names[2:]},
        {"problem": f"<image>{question}", "images": ["broken.png"]},
        {"problem": f"<video>{question}", "videos": ["empty.mp4"]},
    ]
    path = folder / "mixed.jsonl"
    path.write_text("\n".join(json.dumps({**row, "answer": "3"}) for row in rows))
    return path


@pytest.mark.parametrize("padding_free", ["true", "false"])
def test_engine_and_learner_agree_on_text_pictures_and_videos(r1: R1, tmp_path: Path, padding_free: str) -> None:
    rows = write_rows(tmp_path)
    process = r1(
        "train", QUICKSTART, *MIXED, f"data.train_files={rows}", f"data.image_dir={tmp_path}",
        f"worker.actor.padding_free={padding_free}", f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    )  # fmt: skip
    records = read_log(tmp_path / "run")
    assert len(records) == 2
    for record in records:
        assert record["rollout/logprob_gap_max"] < 1e-4
        assert record["critic/score/mean"] >= 0
    assert "2 of 10 rows are left out, they cannot be used" in process.output
    assert "mixed.jsonl:9: picture" in process.output
    assert "mixed.jsonl:10: video" in process.output


@pytest.mark.parametrize("family", sorted({*families.VISION_FAMILIES} - {"qwen2_5_vl"}))  # the quickstart's own
def test_the_other_families_train_on_the_same_mixture(r1: R1, tmp_path: Path, family: str) -> None:
    model, reward = families.save_model(family, tmp_path / family), tmp_path / "reward.py"
    reward.write_text(VARIETY)
    process = r1(
        "train", QUICKSTART, *MIXED, f"data.train_files={write_rows(tmp_path)}", f"data.image_dir={tmp_path}",
        f"worker.actor.model.model_path={model}", "worker.actor.padding_free=true", "trainer.max_steps=3",
        f"worker.reward.reward_function={reward}:compute_score", f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    )  # fmt: skip
    records = read_log(tmp_path / "run")
    assert len(records) == 3
    for record in records:
        assert record["rollout/logprob_gap_max"] < 1e-4
        assert record["actor/grad_norm"] > 0
    assert "2 of 10 rows are left out, they cannot be used" in process.output


def test_unreadable_media_are_refused_where_that_is_asked_for(r1: R1, tmp_path: Path) -> None:
    files = f"data.train_files={write_rows(tmp_path)}", f"data.image_dir={tmp_path}"
    own = f"trainer.save_checkpoint_path={tmp_path / 'run'}"
    process = r1("train", QUICKSTART, *MIXED, *files, own, "data.bad_rows=refuse", ok=False)
    assert process.exit_code != 0
    assert "2 of 10 rows cannot be used" in process.output


def test_a_check_of_the_data_names_broken_pictures_and_videos(r1: R1, tmp_path: Path) -> None:
    files = f"data.train_files={write_rows(tmp_path)}", f"data.image_dir={tmp_path}"
    page = tmp_path / "report.html"
    process = r1("data", "check", QUICKSTART, *MIXED, *files, "--html", page)
    assert "warning  2 × media missing, broken or refused: left out (data.bad_rows=skip_media)" in process.output
    assert "mixed.jsonl:9: picture" in process.output
    assert "mixed.jsonl:10: video" in process.output
    assert page.read_text().count("data:image/jpeg") >= 6
    for words in (["--strict"], ["data.bad_rows=refuse"]):
        process = r1("data", "check", QUICKSTART, *MIXED, *files, *words, ok=False)
        assert process.exit_code == 1
        assert "error  2 × media missing, broken or refused" in process.output


def test_pictures_are_decoded_once_a_run_and_processed_once_an_epoch(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the filter, the engine, the reference, the old and the new policy together, for all answers of a group."""
    pictures, epochs, calls = 4, 2, Counter[str]()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, call)

    counted(vision, "load_image")
    counted(Qwen2VLImageProcessor, "_preprocess")
    r1(
        "train", QUICKSTART, *MIXED, f"data.train_files=examples/quickstart/train.parquet[:{pictures}]",
        f"data.rollout_batch_size={pictures}", f"trainer.max_steps={epochs}", "data.filter_overlong_prompts_workers=1",
        "algorithm.disable_kl=false", "worker.rollout.canary=false", f"trainer.save_checkpoint_path={tmp_path}",
    )  # fmt: skip
    probed = 2  # two prompts more, at the start: may sequences share a row?
    assert calls == {"load_image": pictures + probed, "_preprocess": pictures * epochs + probed}
