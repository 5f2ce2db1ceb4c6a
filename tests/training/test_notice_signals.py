"""The signals that give notice, and who else hears them. The main thread's, of a world of one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from phalanx import MisuseError, Notice, SimulatedBackend
from phalanx.training import notice as module
from phalanx.training.notice import NoticeSignals

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals are the main thread's",
)
KINDS = (signal.SIGTERM, signal.SIGUSR1)


class Clock:
    """What the module reads the time from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """What the program's own handlers are called with."""
    heard: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        heard.append(signum)

    before = [signal.signal(kind, handler) for kind in KINDS]
    yield heard
    for kind, handled in zip(KINDS, before, strict=True):
        signal.signal(kind, handled)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


def alone(*signals: int) -> Notice:
    """A notice of a world of one rank."""
    return Notice(SimulatedBackend.create_group(1)[0], signals=signals or (signal.SIGTERM,))


def test_sigterm_gives_notice_and_the_handler_of_before_does_not_hear_it(heard: list[int]) -> None:
    with alone() as notice:
        assert not notice.given()
        send(signal.SIGTERM)
        assert notice.given()
    assert notice.exit_code == os.EX_TEMPFAIL == 75
    assert heard == []


def test_other_signals_can_be_chosen_and_those_that_are_not_are_left_alone(
    heard: list[int],
) -> None:
    with alone(signal.SIGUSR1) as notice:
        send(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert not notice.given()
        send(signal.SIGUSR1)
        assert notice.given()
    assert heard == [signal.SIGTERM]


def test_signals_that_follow_at_once_are_the_same_notice(heard: list[int], clock: Clock) -> None:
    """An engine sends them to every process, and a launcher passes its own on."""
    with alone(*KINDS):
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            send(signum)
            clock.now += 0.4
    assert heard == []


def test_a_later_one_goes_to_the_handler_of_before(heard: list[int], clock: Clock) -> None:
    with alone(*KINDS) as notice:
        send(signal.SIGUSR1)
        assert notice.given()
        clock.now += 60.0
        send(signal.SIGTERM)
        assert heard == [signal.SIGTERM]


def test_a_later_ctrl_c_interrupts(clock: Clock) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with alone(signal.SIGINT):
            send(signal.SIGINT)
            clock.now += 2.0
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_there_was_no_handler_a_later_signal_ends_the_program(clock: Clock) -> None:
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with alone():
                send(signal.SIGTERM)
                clock.now += 2.0
                send(signal.SIGTERM)
        finally:  # whatever is raised: it must not go on as a second pytest
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_what_was_ignored_before_is_heard_once_and_ignored_again(clock: Clock) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with alone() as notice:
        send(signal.SIGTERM)
        clock.now += 2.0
        send(signal.SIGTERM)
        assert notice.given()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_notice_inside_another_one_is_given_to_both(heard: list[int], clock: Clock) -> None:
    with alone() as outer:
        with alone() as inner:
            send(signal.SIGTERM)
            assert inner.given()
        assert outer.given()
        clock.now += 2.0
        send(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_handlers_are_as_before_afterwards(heard: list[int]) -> None:
    before = [signal.getsignal(kind) for kind in KINDS]
    with pytest.raises(ZeroDivisionError), alone(*KINDS):
        raise ZeroDivisionError
    assert [signal.getsignal(kind) for kind in KINDS] == before


def test_a_handler_that_was_set_meanwhile_stays() -> None:
    with alone():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


# ------------------------------------------------------------------------------
# The signals alone, without a backend.


def test_signals_are_heard_between_install_and_close(heard: list[int], clock: Clock) -> None:
    signals = NoticeSignals(KINDS, elsewhere="")
    send(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert not signals.told
    signals.install()
    send(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert signals.told
    clock.now += 2.0
    send(signal.SIGTERM)
    assert heard == [signal.SIGUSR1, signal.SIGTERM], "a later one is the former handler's"
    signals.close()
    send(signal.SIGTERM)
    assert heard == [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]


def test_another_thread_is_told_the_remedy_of_who_asks() -> None:
    refused: list[str] = []

    def ask() -> None:
        NoticeSignals((), elsewhere="").install()
        try:
            NoticeSignals(KINDS, elsewhere="call leave() there")
        except MisuseError as error:
            refused.append(str(error))

    thread = threading.Thread(target=ask, name="trainer")
    thread.start()
    thread.join()
    assert refused == [
        "Python handles signals in the main thread, and this is 'trainer': call leave() there"
    ]
