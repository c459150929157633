"""A signal ends sampling at once, learning at the next step, and a second signal ends everything."""

import os
import signal
from hashlib import pbkdf2_hmac
from threading import Event, Thread, Timer

import pytest
from faults_table import note_fault
from patience import eventually

from r1_cli.checkpoint.stop import GraceOver, Stopped, StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_waits_where_learning_is_under_way(number: signal.Signals) -> None:
    with StopRequest().listening() as stop:
        os.kill(os.getpid(), number)
        assert stop.requested
        with pytest.raises(Stopped, match=number.name):
            stop.check()


def test_the_first_signal_leaves_an_interruptible_block_at_once() -> None:
    with StopRequest().listening() as stop, pytest.raises(Stopped), stop.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)


def test_the_second_signal_interrupts() -> None:
    with StopRequest().listening():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().listening():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_that_gets_no_signals_listens_to_none() -> None:
    found: list[object] = []

    def listen() -> None:
        with StopRequest().listening() as stop:
            found.append(stop.requested)

    (thread := Thread(target=listen)).start()
    thread.join()
    assert found == [False]


def test_a_run_that_goes_on_after_a_schedulers_signal_leaves_before_its_grace_is_over() -> None:
    killed: list[int] = []
    stop = StopRequest(0.4, lambda: "global_step_5", killed.append)

    def take_step() -> None:
        with stop.listening():
            os.kill(os.getpid(), signal.SIGUSR1)
            Event().wait(60)

    with pytest.raises(GraceOver, match=r"lost; the next start resumes from global_step_5") as ended:
        take_step()
    assert ended.value.code == stop.exit_code == 128 + signal.SIGUSR1
    assert not killed
    assert eventually(lambda: killed == [stop.exit_code])  # as what comes after the block hangs, too
    note_fault("SIGUSR1 in a step that does not end in time", outcome="resumes")


def test_a_run_that_ends_in_time_is_not_killed_and_ctrl_c_has_no_grace() -> None:
    killed: list[int] = []
    with StopRequest(0.1, kill=killed.append).listening():
        os.kill(os.getpid(), signal.SIGTERM)
    with StopRequest(0.1, kill=killed.append).listening():
        os.kill(os.getpid(), signal.SIGINT)
        Event().wait(0.2)
    assert not killed


def test_a_long_call_of_c_does_not_hold_up_the_end() -> None:
    """Python's handlers wait for the end of such a call, as torch's are; the process is killed meanwhile."""
    killed: list[int] = []
    stop = StopRequest(0.2, kill=killed.append)

    def take_step() -> None:
        with stop.listening():
            Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            pbkdf2_hmac("sha256", b"", b"", 4_000_000)  # a second or more
            Event().wait(60)

    with pytest.raises(GraceOver):
        take_step()
    assert killed == [128 + signal.SIGTERM]
