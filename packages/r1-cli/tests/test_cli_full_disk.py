"""A run on a disk that is really full or read-only goes on, and loses neither its log nor its checkpoints."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults_table import note_fault

# In mount and user namespaces of its own, where it may mount and remount a disk of 512 KB.
SCRIPT = """
import json, logging, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

from r1_cli.checkpoint import remote
from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore
from r1_cli.checkpoint.remote import RemoteFolder, Uploader
from r1_cli.checkpoint.saving import Saver
from r1_cli.runs.track import RunInfo, Tracker

logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)
remote.PAUSE = 0.0
disk, outside = map(Path, sys.argv[1:])
mount = lambda *words: subprocess.run(["mount", *words, str(disk)], check=True)
mount("-t", "tmpfs", "-o", "size=512k", "none")

def make_read_only():
    mount("-o", "remount,ro")

def fill_up():
    try:
        with (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
    except OSError as error:
        assert "No space left" in str(error)

def heal():
    mount("-o", "remount,rw")
    (disk / "filler").unlink(missing_ok=True)

def fill(folder):
    (folder / "weights").write_bytes(bytes(60_000))

def save(step):
    saver.write(step, fill, {"step": step, "val_reward_score": None}, apart=True)
    saver.publish(lambda: None)
    saver.finish()

run = disk / "run"
run.mkdir()
tracker = Tracker([], RunInfo("project", "experiment", run, {}, resumed_from=0), MagicMock())
store = CheckpointStore(run, limit=1)
saver = Saver(store, most_failed=3)
record = {f"metric/{number}": float(number) for number in range(400)}  # more than a page of the disk
refused = 0
for step in range(1, 6):
    {2: fill_up, 4: make_read_only}.get(step, heal)()
    tracker.log(step, record)
    try:
        tracker.flush()
    except CheckpointError:
        refused += 1
    save(step)
tracker.close()
saver.close()

# The copy at a URL is on that disk now, the run on another.
store = CheckpointStore(outside, limit=2)
uploader = Uploader(store, f"file://{disk}/copy")
saver = Saver(store, published=uploader.upload)
for step in (1, 2):
    make_read_only() if step == 1 else heal()
    save(step)
    uploader.wait()
uploader.close()
logged = [json.loads(line)["step"] for line in (run / "experiment_log.jsonl").read_text().splitlines()]
print(json.dumps([refused, logged, CheckpointStore(run).steps(), RemoteFolder(f"file://{disk}/copy").steps()]))
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount() -> bool:
    words = [*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(words, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this process may not mount a disk in a namespace of its own")
def test_log_checkpoints_and_uploads_go_on_when_the_disk_can_be_written_again(tmp_path: Path) -> None:
    folders = tmp_path / "disk", tmp_path / "outside"
    for folder in folders:
        folder.mkdir()
    words = [*UNSHARE, sys.executable, "-c", SCRIPT, *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *warnings, last = done.stdout.splitlines()
    refused, logged, saved, uploaded = json.loads(last)
    assert refused == 2, "a checkpoint waits for its log"
    assert (logged, saved, uploaded) == ([1, 2, 3, 4, 5], [5], [2])
    text = "\n".join(warnings)
    assert text.count("waits in memory, and the run goes on") == text.count("log is written again") == 2
    assert text.count("the run goes on, and saves again after each step") == 2
    assert text.count("checkpoints are written again, after 1 that") == 2
    assert all(told in text for told in ("No space left", "Read-only file system", "copy again"))
    for fault in ("a full disk", "a disk that becomes read-only", "an upload of a checkpoint that fails"):
        note_fault(fault, outcome="goes on")
