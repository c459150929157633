"""Tests of worker processes: bounded memory and time, deaths that cost one task, and the same result as without."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe, forkserver

import pytest
import torch
from data_targets import MEGABYTE, Frail, Target
from faults_table import note_fault
from patience import eventually

from r1_data.dataset import PromptDataset
from r1_data.prefetch import PromptMemory, RenderJob
from r1_data.render import Renderer
from r1_data.types import DataError, MediaError
from r1_data.workers import WorkerDied, Workers
from r1_data.workers.transfer import receive, send


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(Target(), 1, memory_bytes=300 * MEGABYTE, seconds=120.0) as started:
        yield started


def test_results_and_errors_come_back_as_they_are(workers):
    assert workers.submit("add", 1, 2).result() == 3
    assert torch.equal(workers.submit("tensor").result(), Target().tensor())
    large = workers.submit("arrays").result()
    assert torch.equal(large[0], torch.arange(10**6).view(1000, 1000))
    assert (large[1].shape, large[2]) == ((0, 3), "done")
    with pytest.raises(MediaError, match="t:1: no such picture"):
        workers.submit("refuse").result()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("crash", r"ended by itself \(exit code 7\)"),
        ("slain", r"ended by itself \(exit code -9\)"),
        ("swell", "needs more than 314,572,800 bytes"),
    ],
)
def test_a_death_costs_one_task_and_says_why(workers, act, message):
    broken, sound = workers.submit("act", act), workers.submit("add", 1, 2)
    with pytest.raises(WorkerDied, match=message):
        broken.result()
    assert sound.result() == 3


@pytest.mark.parametrize("act", ["hang", "stall"])
def test_a_task_that_does_not_end_costs_one_task_and_says_so(act, monkeypatch):
    with Workers(Target(), 1, seconds=1.0) as workers:
        with pytest.raises(WorkerDied, match="took longer than 1 seconds"):
            workers.submit("act", act).result()
        monkeypatch.setattr(workers, "_seconds", 120.0)
        assert workers.submit("add", 1, 2).result() == 3
    note_fault("a row whose media worker hangs", outcome="goes on")


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "255: what is known where the server was killed as well"])
def test_a_task_whose_worker_was_killed_from_outside_is_tried_again(workers, tmp_path, end):
    assert workers.submit("act", f"unlucky {tmp_path / 'killed'} {end}").result() is None
    assert (tmp_path / "killed").exists()
    note_fault("SIGKILL of a media worker", outcome="goes on")


@pytest.mark.slow
def test_a_fork_server_and_both_its_workers_terminated_at_once_lose_no_task(tmp_path):
    with Workers(Target(), 2, seconds=120.0) as both:
        started = [tmp_path / "first", tmp_path / "second"]
        tasks = [both.submit("act", f"terminated {path}") for path in started]
        assert eventually(lambda: all(path.exists() for path in started))
        for pid in (fork_server(), *(int(path.read_text()) for path in started)):
            os.kill(pid, signal.SIGTERM)
        assert [task.result() for task in tasks] == [None, None]


def test_workers_that_start_while_their_fork_server_is_ending_start_from_the_next_one(workers):
    assert workers.submit("add", 1, 2).result() == 3  # the server runs
    with Workers(Target(), 2, seconds=120.0) as fresh:
        assert fresh.compute(int).result() == 0  # its threads do
        os.kill(fork_server(), signal.SIGTERM)
        assert [task.result() for task in [fresh.submit("add", 1, number) for number in range(2)]] == [1, 2]
    note_fault("SIGTERM of the process that media workers are forked from", outcome="goes on")


def fork_server() -> int:
    """The id of the process that workers are forked from."""
    return int(forkserver._forkserver._forkserver_pid)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.02, 0.5, 0.999])
def test_a_message_of_which_the_rest_does_not_come_is_given_up(share):
    message = {"text": "?", "array": torch.arange(1000).numpy()}
    (whole, source), (ours, theirs) = Pipe(), Pipe()
    with whole, source, ours, theirs:
        send(source, message)
        sent = os.read(whole.fileno(), 10**6)
        os.write(theirs.fileno(), sent[: int(share * len(sent))])
        with pytest.raises(TimeoutError):
            receive(ours, 0.05)
        theirs.close()
        with pytest.raises(EOFError):
            receive(ours, 60.0)


def test_what_follows_a_task_computes_on_one_thread_and_nothing_else_does():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    several = torch.get_num_threads()  # 3, but where vLLM has bound the threads of this process
    try:
        with Workers(Target(), 1) as fresh:
            assert fresh.submit("add", 1, 2, then=lambda _: torch.get_num_threads()).result() == 1
        with ThreadPoolExecutor(1) as another:
            assert another.submit(torch.get_num_threads).result() == torch.get_num_threads() == several
    finally:
        torch.set_num_threads(before)


def test_the_pool_never_sets_the_number_of_threads_that_other_threads_take_over(monkeypatch):
    """The main thread trained with one thread if it first computed meanwhile: 5 of 12 runs had other last bits."""
    several = torch.get_num_threads()

    def refuse(count):
        raise AssertionError(f"torch.set_num_threads({count}): another thread that first computes now has that number")

    monkeypatch.setattr(torch, "set_num_threads", refuse)
    with Workers(Target(), 2) as fresh:
        assert {fresh.compute(torch.get_num_threads).result() for _ in range(4)} == {1}
    assert torch.get_num_threads() == several


def test_row_that_breaks_its_worker_is_named_and_the_others_are_kept(processor, picture):
    images = [picture(30, 30)]
    texts = ["crash" if number == 40 else "?" for number in range(1, 71)]
    rows = [(f"t:{n}", {"prompt": text, "answer": "1", "images": images}) for n, text in enumerate(texts, start=1)]
    renderer = Frail(processor)
    with Workers(renderer, 2, seconds=60.0) as workers:
        dataset = PromptDataset(rows, renderer, max_prompt_length=200, bad_rows="skip_media", workers=workers)
        assert dataset.summary.bad == ("t:40: its worker process ended by itself (exit code 7)",)
        assert [dataset[i].id for i in (38, 39)] == ["t:39", "t:41"]
        with pytest.raises(DataError, match=r"1 of 70 rows cannot be used:\n  t:40: its worker"):
            PromptDataset(rows, renderer, max_prompt_length=200, workers=workers)
    note_fault("a row that crashes its media worker", outcome="goes on")


def test_prompts_of_workers_equal_those_made_here(processor, picture, movie):
    rows = [
        (f"t:{i}", {"prompt": "<image>?", "answer": "1", "images": [picture(60, 40 + i)], "kept": object()})
        for i in range(5)
    ]
    rows.append(("t:5", {"prompt": "<video>?", "answer": "1", "videos": [movie(64, 48, 8)], "kept": None}))
    renderer = Renderer(processor)
    expected = PromptDataset(rows, renderer, max_prompt_length=2000, memory=PromptMemory(0))
    with Workers(renderer, 1) as workers:
        dataset = PromptDataset(rows, renderer, max_prompt_length=2000, workers=workers)
        assert dataset.summary == expected.summary
        dataset.prefetch(range(6))
        dataset.prefetch([5, 4, 3, 2, 1, 0])
        for index in (0, 5, 3, 1, 2, 4):
            own, made = expected[index], dataset[index]
            assert (own.id, own.ground_truth) == (made.id, made.ground_truth)
            assert (own.token_ids, own.metadata, own.text) == (made.token_ids, made.metadata, made.text)
            assert [image.tobytes() for image in own.images] == [image.tobytes() for image in made.images]
            assert all(torch.equal(a, b) for a, b in zip(own.videos, made.videos, strict=True))
            assert own.model_inputs.keys() == made.model_inputs.keys()
            assert all(torch.equal(own.model_inputs[name], made.model_inputs[name]) for name in own.model_inputs)
        dataset.prefetch(range(6))  # from memory, in threads of this process
        again = [dataset[index].model_inputs for index in range(6)]
        for index, inputs in enumerate(again):
            assert all(torch.equal(inputs[name], value) for name, value in expected[index].model_inputs.items())


class Unloadable(Target):
    """What a worker cannot load."""

    def __setstate__(self, state: object) -> None:
        raise ImportError("no such module here")

    def __reduce_ex__(self, protocol: object) -> tuple:
        return (Unloadable, (), {"some": "state"})


def test_workers_that_cannot_start_are_an_error_of_the_run_not_of_a_row():
    with Workers(Unloadable(), 1) as workers, pytest.raises(RuntimeError, match="did not start"):
        workers.submit("add", 1, 2).result()


class Starts:
    """In the place of a `RowRenderer`: notes which rows were started."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def start(self, row: int) -> Future:
        self.rows.append(row)
        return Future()


def test_prompts_rendered_ahead_stay_within_their_memory():
    started = Starts()

    def jobs(*rows: int) -> list[RenderJob]:
        return [RenderJob(started, row, 4) for row in rows]

    memory = PromptMemory(ahead_bytes=10 * 25_000)
    memory.prefetch(jobs(*range(6)))
    assert started.rows == [0, 1]
    memory.render(*jobs(0))
    assert started.rows == [0, 1, 2]
    memory.render(*jobs(4))  # not in order: started at once, and not again
    assert started.rows == [0, 1, 2, 4]
    memory.prefetch(jobs(7, 2))  # row 1 is cancelled
    assert started.rows == [0, 1, 2, 4, 7]
    memory.render(*jobs(2))
    assert started.rows == [0, 1, 2, 4, 7]
    assert memory.pending_bytes == 4 * 25_000
