"""The quickstart trains, reports what it does, and its model uses the pictures."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from endtoend import QUICKSTART, R1, ROOT, SMALL, listed_metrics, read_log
from PIL import Image
from safetensors.torch import load_file

from r1_cli.build import profiling
from r1_cli.runs.reader import RunReader

FOLDER = ROOT / "examples/quickstart"
CHANCE = 0.25  # four answers, equally often right


def test_every_step_is_logged_once_with_the_names_dashboards_know(quickstart: Path) -> None:
    records = read_log(quickstart)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert {"val/reward_score", "val/accuracy_reward"} <= records[0].keys()
    expected = {
        "reward/overall", "reward/accuracy", "critic/score/mean", "critic/rewards/max", "critic/advantages/min",
        "critic/returns/mean", "actor/pg_loss", "actor/kl_loss", "actor/kl_coef", "actor/ppo_kl", "actor/entropy_loss",
        "actor/pg_clipfrac_higher", "actor/pg_clipfrac_lower", "actor/grad_norm", "actor/lr", "response_length/mean",
        "response_length/clip_ratio", "prompt_length/max", "perf/throughput", "perf/time_per_step",
        "perf/total_num_tokens", "perf/cpu_memory_used_gb", "timing_s/gen", "timing_s/reward", "timing_s/old",
        "timing_s/ref", "timing_s/adv", "timing_s/update_actor", "timing_s/step", "global_seqlen/mean",
    }  # fmt: skip
    assert not expected - records[1].keys()
    assert {"val/reward_score", "timing_s/validation", "timing_s/save_checkpoint"} <= records[2].keys()


def test_every_metric_of_a_run_stands_on_the_page(quickstart: Path) -> None:
    patterns = listed_metrics()
    # `actor/NAME` is for what losses of users report: ours are to be named.
    patterns = [pattern for pattern in patterns if pattern.pattern != "actor/[^ ]+"]
    written = {name for record in read_log(quickstart) for name in record} - {"step"}
    assert len(written) > 50
    assert not [name for name in sorted(written) if not any(pattern.fullmatch(name) for pattern in patterns)]


def test_the_page_lists_no_metric_that_is_gone(quickstart: Path) -> None:
    """Those without a placeholder, of the sections that every run has."""
    others = {"timing_s/wait", "timing_s/tools", "timing_s/copy_to_memory"}  # of other settings
    written = {name for record in read_log(quickstart) for name in record} | others
    sections = ("critic/", "response_length/", "prompt_length/", "global_seqlen/", "timing_s/", "rollout/groups")
    exact = [p.pattern.replace("\\", "") for p in listed_metrics() if "[^ ]" not in p.pattern]
    assert not [name for name in exact if name.startswith(sections) and name not in written]


def test_engine_and_learner_agree_on_every_sampled_token(quickstart: Path) -> None:
    for record in read_log(quickstart)[1:]:
        assert record["rollout/logprob_gap_max"] < 1e-4
        assert record["rollout/effective_sample_size"] == pytest.approx(1, abs=1e-6)


def test_the_first_update_starts_from_ratio_one(quickstart: Path) -> None:
    record = read_log(quickstart)[1]
    assert record["actor/pg_clipfrac_higher"] == 0
    assert abs(record["actor/ppo_kl"]) < 1e-3


def test_a_timeline_shows_what_each_thread_did_in_each_step(quickstart: Path) -> None:
    written = json.loads((quickstart / "timeline.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in written if event["name"] == "thread_name"}
    assert {"driver", "r1-recording"} <= set(names.values())
    spans = sorted((event for event in written if event["ph"] == "X"), key=lambda event: (event["ts"], -event["dur"]))
    for thread in names:
        open_until: list[float] = []
        for span in (one for one in spans if one["tid"] == thread):
            open_until = [end for end in open_until if end > span["ts"] + 1e-3]
            assert all(span["ts"] + span["dur"] <= end + 1 for end in open_until), "the spans of one thread nest"
            open_until.append(span["ts"] + span["dur"])
    steps = [span for span in spans if span["name"].startswith("step ")]
    assert [step["name"] for step in steps] == ["step 1", "step 2"]
    for step in steps:
        end = step["ts"] + step["dur"]
        inside = {one["name"] for one in spans if step["ts"] <= one["ts"] and one["ts"] + one["dur"] <= end}
        assert inside >= {"sync", "render", "gen", "decode", "reward", "old", "ref", "adv", "update_actor", "metrics"}
    assert {one["name"] for one in spans if one["ts"] >= steps[1]["ts"]} >= {"validation", "save_checkpoint"}


def test_the_user_sees_the_plan_the_progress_and_the_next_commands(quickstart: Path) -> None:
    output = (quickstart / "output.txt").read_text()
    for said in ("rows", "optimizer steps", "model states", "step 3/3", "validation at step 2", "merge ", "eval "):
        assert said in output
    assert str(quickstart / "global_step_3") in output


SIZES = [f"worker.actor.micro_batch_size_per_device_for_{kind}" for kind in ("update", "experience")]


def test_micro_batches_choose_themselves_and_say_so(quickstart: Path) -> None:
    output = (quickstart / "output.txt").read_text()
    update, experience = map(int, re.findall(r"of the actor: (\d+) for updates, (\d+) for log-probs", output)[0])
    assert re.search(r"accumulations +auto, found at start", output)
    settings = json.loads((quickstart / "experiment_config.json").read_text())["worker"]["actor"]
    assert [settings[key.rpartition(".")[2]] for key in SIZES] == [update, experience]
    assert {record.get("perf/micro_batch_size", update) for record in read_log(quickstart)} == {update}
    kept = json.loads((quickstart / "global_step_2/trainer.json").read_text())["micro_batches"]
    assert kept == dict(zip(SIZES, (update, experience), strict=True))


def test_sizes_that_are_auto_are_as_good_as_set_and_a_checkpoint_keeps_them(
    quickstart: Path, r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path, *words: str) -> str:
        words += (f"trainer.save_checkpoint_path={folder}", "algorithm.disable_kl=false", "trainer.val_freq=-1")
        steps = ["trainer.max_steps=3", "trainer.save_freq=2", "trainer.val_before_train=false"]
        return r1("train", QUICKSTART, *SMALL, *steps, *words).output

    chosen = json.loads((quickstart / "global_step_2/trainer.json").read_text())["micro_batches"]
    run(tmp_path / "set", *(f"{key}={size}" for key, size in chosen.items()))
    # What a later version would choose is another size.
    monkeypatch.setattr(profiling, "count_sequences", lambda *_: 7)
    auto, start = [f"{key}=auto" for key in SIZES], f"trainer.load_checkpoint_path={quickstart / 'global_step_2'}"
    assert f"{chosen[SIZES[0]]} for updates" in run(tmp_path / "resumed", *auto, start)
    # A run that was killed before its first checkpoint leaves a manifest.
    (tmp_path / "killed").mkdir()
    shutil.copy(quickstart / "manifest.json", tmp_path / "killed")
    assert f"{chosen[SIZES[0]]} for updates" in run(tmp_path / "killed", *auto)
    expected = load_file(quickstart / "global_step_3/actor/model.safetensors")
    for name in ("set", "resumed", "killed"):
        found = load_file(tmp_path / name / "global_step_3/actor/model.safetensors")
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), name


def test_a_run_with_a_truncated_newest_checkpoint_resumes_from_the_one_before_and_says_so(
    quickstart: Path, r1: R1, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(quickstart, run)
    cut = run / "global_step_3/actor/optimizer.safetensors"
    os.truncate(cut, cut.stat().st_size - 100)
    words = [*SMALL, "trainer.max_steps=3", "trainer.save_freq=2", "trainer.val_freq=-1", "algorithm.disable_kl=false"]
    words += ["trainer.val_before_train=false", f"trainer.save_checkpoint_path={run}"]
    shown = r1("train", QUICKSTART, *words, "--dry-run").output
    assert "global_step_3 is damaged (actor/optimizer.safetensors: it has " in shown
    assert shown.splitlines()[-1] == f"resumes from {run}/global_step_2"
    output = " ".join(r1("train", QUICKSTART, *words).output.split())
    assert "the run resumes from global_step_2: 1 step is taken again" in output
    assert (run / "damaged_global_step_3/actor/optimizer.safetensors").is_file()
    expected, found = (load_file(one / "global_step_3/actor/model.safetensors") for one in (quickstart, run))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_the_run_leaves_its_settings_and_some_answers(quickstart: Path) -> None:
    assert json.loads((quickstart / "experiment_config.json").read_text())["trainer"]["max_steps"] == 3
    written = [json.loads(line) for line in (quickstart / "generations.jsonl").read_text().splitlines()]
    assert {one["step"] for one in written if one["split"] == "val"} == {0, 2, 3}
    assert {one["step"] for one in written if one["split"] == "train"} == {1, 2, 3}
    assert {"prompt", "response", "ground_truth", "score"} <= written[0].keys()


def test_every_answer_is_recorded_as_the_metrics_say(quickstart: Path) -> None:
    records = {record["step"]: record for record in read_log(quickstart)}
    assert RunReader(quickstart).recorded_steps() == [1, 2, 3]
    assert RunReader(quickstart).recorded_steps("validation") == [0, 2, 3]
    for step in (1, 2, 3):
        rows, record = RunReader(quickstart).samples(step), records[step]
        assert fmean(row["score"] for row in rows) == pytest.approx(record["reward/overall"])
        assert fmean(row["parts"]["accuracy"] for row in rows) == pytest.approx(record["reward/accuracy"])
        assert fmean(len(row["tokens"]) for row in rows) == pytest.approx(record["response_length/mean"])
        advantages = [one for row in rows for one in row["advantages"]]
        assert min(advantages) == pytest.approx(record["critic/advantages/min"])
        gaps = [abs(a - b) for row in rows for a, b in zip(row["rollout_logprobs"], row["old_logprobs"], strict=True)]
        assert max(gaps) == pytest.approx(record["rollout/logprob_gap_max"], abs=1e-6)
        entropies = [one for row in rows for one in row["entropies"]]
        assert fmean(entropies) == pytest.approx(record["actor/entropy_loss"], rel=0.05)  # that of two minibatches
        assert {row["weight_version"] for row in rows} == {step - 1}
        assert all((quickstart / "media" / name).is_file() for row in rows for name in row["media"])
        assert {len(row["media"]) for row in rows} == {1}
    rows = RunReader(quickstart).samples(2, "validation")
    assert fmean(row["score"] for row in rows) == pytest.approx(records[2]["val/reward_score"])


def test_the_manifest_says_what_ran(quickstart: Path) -> None:
    (start,) = RunReader(quickstart).starts()
    assert start["end"] == "complete"
    assert start["config"]["trainer"]["max_steps"] == 3
    assert start["packages"].keys() >= {"torch", "transformers", "r1-cli"}
    assert start["rows"]["train"]
    assert start["seeds"] == {"data": 1, "rollout": 1}


def test_the_record_is_read_in_a_line_as_the_page_says(quickstart: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/run-folder.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    (tmp_path / "read.py").write_text(
        "\n".join([*blocks, "print(len(samples), worst.fetchone()[2], rewards[3], best)"])
    )
    (tmp_path / "checkpoints/quickstart").mkdir(parents=True)
    (tmp_path / "checkpoints/quickstart/shapes").symlink_to(quickstart)
    command = [sys.executable, "read.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    train = [row for step in (1, 2, 3) for row in RunReader(quickstart).samples(step)]
    val = [row for step in (0, 2, 3) for row in RunReader(quickstart).samples(step, "validation")]
    assert int(said[0]) == len(train) + len(val)
    assert float(said[1]) == min(row["score"] for row in train if row["step"] == 3)
    assert float(said[2]) == read_log(quickstart)[3]["reward/overall"]


def test_a_checkpoint_holds_no_pickle(quickstart: Path) -> None:
    files = [path for path in quickstart.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jsonl", ".jinja", ".txt", ".parquet", ".png"}


def test_a_merged_checkpoint_loads_in_transformers_and_scores_the_same(
    quickstart: Path, r1: R1, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

    checkpoint, merged = quickstart / "global_step_3", tmp_path / "merged"
    assert str(merged) in r1("merge", checkpoint, "--output", merged).stdout.replace("\n", "")
    model, info = AutoModelForImageTextToText.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    trained = load_file(checkpoint / "actor" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in trained.items())
    assert AutoProcessor.from_pretrained(merged).tokenizer.chat_template
    assert GenerationConfig.from_pretrained(merged).eos_token_id is not None

    r1("eval", merged, QUICKSTART, *SMALL, "--json", tmp_path / "merged.json")
    score = json.loads((tmp_path / "merged.json").read_text())["reward_score"]
    assert score == read_log(quickstart)[-1]["val/reward_score"]


def test_eval_reports_accuracy_and_what_k_answers_give(quickstart: Path, r1: R1, tmp_path: Path) -> None:
    sampled = ["worker.rollout.val_override_config.temperature=1", "worker.rollout.val_override_config.n=4"]
    process = r1("eval", quickstart / "global_step_2", QUICKSTART, *SMALL, *sampled, "--json", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    for name in ("accuracy", "avg@4", "pass@1", "pass@2", "pass@4", "maj@4"):
        assert name in process.stdout
        assert 0 <= result[name] <= 1
    assert result["pass@1"] <= result["pass@2"] <= result["pass@4"]


def blank_pictures(source: Path, target: Path) -> None:
    """Write the rows again, every picture replaced by a white one of the same size."""
    table = pq.read_table(source).to_pylist()
    for row in table:
        for picture in row["images"]:
            white = io.BytesIO()
            Image.new("RGB", Image.open(io.BytesIO(picture["bytes"])).size, "white").save(white, "PNG")
            picture["bytes"] = white.getvalue()
    pq.write_table(pa.Table.from_pylist(table), target)


@pytest.mark.slow
def test_the_model_learns_to_look(r1: R1, tmp_path: Path) -> None:
    """A sixth of the quickstart teaches most of it; with the pictures blanked out, the same model only guesses."""
    r1(
        "train", QUICKSTART, "trainer.max_steps=24", "trainer.val_freq=24", "trainer.save_freq=24",
        f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    )  # fmt: skip
    before, after = (read_log(tmp_path / "run")[step]["val/accuracy_reward"] for step in (0, 24))
    assert after > before + 0.25

    blank_pictures(FOLDER / "val.parquet", tmp_path / "blank.parquet")
    result = tmp_path / "blank.json"
    r1(
        "eval",
        tmp_path / "run/global_step_24",
        QUICKSTART,
        f"data.val_files={tmp_path / 'blank.parquet'}",
        "--json",
        result,
    )
    assert json.loads(result.read_text())["accuracy"] == pytest.approx(CHANCE, abs=0.06)


@pytest.mark.slow
def test_a_step_of_the_quickstart_can_be_timed_beside_another_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from end_to_end import Side

    side = Side.start("r1", "quickstart", tmp_path, ROOT)
    side.ready()
    assert side.turn(1), side.log.read_text()
    side.end()
    assert side.median() > sum(side.steps[0]["phases"].values()) > 0
    assert side.steps[0]["tokens"] > 1


def test_the_committed_pictures_and_answers_are_what_the_readme_says() -> None:
    train, val = (pq.read_table(FOLDER / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    assert len(val) >= 256
    seen = {row["images"][0]["bytes"] for row in train}
    assert not seen & {row["images"][0]["bytes"] for row in val}
    answers = [row["answer"] for row in val]
    assert all(answers.count(answer) == len(val) * CHANCE for answer in set(answers))


def test_the_committed_model_is_small() -> None:
    assert sum(path.stat().st_size for path in (FOLDER / "model").iterdir()) < 3_000_000
