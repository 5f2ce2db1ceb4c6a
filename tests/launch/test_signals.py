from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import connection
from types import FrameType

import pytest

from phalanx.launch.signals import Interrupted, Signals, announce_end

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals are the main thread's",
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Programs that were told to end ignore signals from then on; this one goes on."""
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = [signal.getsignal(kind) for kind in kinds]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


def test_a_signal_wakes_the_loop_which_raises_it() -> None:
    with Signals() as signals:
        signals.check()
        sender = threading.Timer(0.01, send, [signal.SIGTERM])
        sender.start()
        assert connection.wait(signals.descriptors, 30) == signals.descriptors
        with pytest.raises(Interrupted) as raised:
            signals.check()
        sender.join()
    assert raised.value.args == (signal.SIGTERM,)
    assert signals.received == [signal.SIGTERM]


def test_nothing_is_raised_but_by_the_check() -> None:
    """Not in the middle of starting a rank, nor while cleaning up."""
    with Signals() as signals:
        send(signal.SIGINT)
        assert not signals.again()
        with pytest.raises(Interrupted):
            signals.check()
        with pytest.raises(Interrupted):
            signals.check()
    send(signal.SIGTERM)  # nobody hears it any more


def test_a_second_signal_asks_for_a_hurry() -> None:
    with Signals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert signals.again()
        with pytest.raises(Interrupted) as raised:
            signals.check()
    assert raised.value.args == (signal.SIGTERM,)


def test_what_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals() as signals:
        send(signal.SIGHUP)
        assert connection.wait(signals.descriptors, 0) == []
        assert signals.received == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_signal_for_the_ranks_wakes_the_loop_once_and_ends_nothing() -> None:
    with Signals() as signals:
        send(signal.SIGUSR1)
        assert connection.wait(signals.descriptors, 30) == signals.descriptors
        assert signals.take() == [signal.SIGUSR1]
        assert connection.wait(signals.descriptors, 0) == []
        assert signals.take() == []
        signals.check()


def test_a_signal_that_is_forgotten_is_followed_by_a_first_one() -> None:
    with Signals() as signals:
        send(signal.SIGTERM)
        signals.forget()
        signals.check()
        send(signal.SIGTERM)
        assert not signals.again()
        with pytest.raises(Interrupted):
            signals.check()


def test_without_a_signal_all_is_as_before() -> None:
    def handler(signum: int, frame: FrameType | None) -> None:
        """A program's own."""

    signal.signal(signal.SIGTERM, handler)
    with Signals():
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler


def test_another_thread_leaves_signals_alone() -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with Signals() as signals:
                signals.check()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []


def test_the_exit_code_is_a_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert announce_end(signal.SIGINT) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"
