from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import pytest

from phalanx.launch.signals import Interrupted, Signals

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals are the main thread's",
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Programs that were told to end ignore signals from then on; this one goes on."""
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(kind) for kind in kinds]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


def send_and_wait(signum: int) -> None:
    send(signum)
    threading.Event().wait(30)
    raise AssertionError("nothing was raised")


def patient() -> Signals:
    """Does not end this process, however slow it is."""
    return Signals(last_call=600.0)


def test_the_first_signal_is_raised_when_the_ranks_have_been_told() -> None:
    events: list[object] = []
    with patient() as signals:
        signals.arm()
        signals.settle = lambda: events.append("settled")
        signals.tell = lambda signum: events.append(f"told {signum}")
        with pytest.raises(Interrupted) as raised:
            send_and_wait(signal.SIGTERM)
    assert events == ["settled", f"told {signal.SIGTERM}"]
    assert raised.value.signum == signals.received == signal.SIGTERM


def test_a_second_signal_ends_at_once_what_there_is() -> None:
    forced = threading.Event()
    with patient() as signals:
        signals.arm()
        signals.force = forced.set

        def tell(signum: int) -> None:
            send(signal.SIGINT)
            assert forced.wait(30)

        signals.tell = tell
        with pytest.raises(Interrupted):
            send_and_wait(signal.SIGINT)


def test_a_signal_that_was_lost_is_raised_at_the_next_look() -> None:
    with patient() as signals:
        signals.arm()
        with suppress(Interrupted):  # as in a destructor, where Python itself drops it
            send_and_wait(signal.SIGINT)
        with pytest.raises(Interrupted):
            signals.check()


def test_a_signal_that_comes_too_soon_is_raised_when_there_is_someone_to_catch_it() -> None:
    told = threading.Event()
    with patient() as signals:
        signals.settle = told.set
        send(signal.SIGTERM)
        assert told.wait(30)
        with pytest.raises(Interrupted):
            signals.arm()


def test_nothing_is_raised_while_cleaning_up() -> None:
    told = threading.Event()
    with patient() as signals:
        signals.arm()
        signals.disarm()
        signals.settle = told.set
        send(signal.SIGTERM)
        assert told.wait(30)
        signals.check()
    assert signals.received == signal.SIGTERM
    send(signal.SIGTERM)  # nobody hears it any more


def test_what_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with patient() as signals:
        send(signal.SIGHUP)
        time.sleep(0.05)  # for what must not happen
        assert signals.received is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_without_a_signal_all_is_as_before() -> None:
    def handler(signum: int, frame: FrameType | None) -> None:
        """A program's own."""

    signal.signal(signal.SIGTERM, handler)
    with patient():
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler


def test_another_thread_leaves_signals_alone() -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with patient() as signals:
                signals.check()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []


def test_it_is_said_once_and_the_exit_code_is_a_shells(
    capsys: pytest.CaptureFixture[str],
) -> None:
    signals = patient()
    assert [signals.say(signal.SIGINT) for _ in range(2)] == [130, 130]
    assert capsys.readouterr().err == "stopped by SIGINT\n"
