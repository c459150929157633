"""A signal ends sampling at once, learning at the next step, and a second signal ends everything."""

import os
import signal
from threading import Thread

import pytest

from r1_cli.checkpoint.stop import Stopped, StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
