"""A rank that is told to stop does, once, also if Python drops what the signal's handler raises."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from phalanx.errors import RankStopped
from phalanx.launch.worker import _Stop

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals are the main thread's",
)
LONG = 20.0  # seconds


@pytest.fixture(autouse=True)
def told() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    hook = sys.unraisablehook
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _Stop()
    yield
    sys.unraisablehook = hook
    for each, handler in before.items():
        signal.signal(each, handler)


class Thing:
    def __init__(self, at_end: Callable[[], object]) -> None:
        self.at_end = at_end


class Finalized(Thing):
    def __del__(self) -> None:
        self.at_end()


def go_on_after(act: Callable[[], object]) -> None:
    act()
    time.sleep(LONG)


def in_a_finalizer(act: Callable[[], object]) -> None:
    Finalized(act)


def in_a_callback_of_a_weakref(act: Callable[[], object]) -> None:
    thing = Thing(act)
    reference = weakref.ref(thing, lambda _: act())
    del thing
    assert reference() is None


def in_the_garbage_collector(act: Callable[[], object]) -> None:
    thing = Finalized(act)
    thing.itself = thing  # type: ignore[attr-defined]
    del thing
    gc.collect()


def in_the_finalizer_of_a_finalizer(act: Callable[[], object]) -> None:
    Finalized(lambda: Finalized(act))


@pytest.mark.parametrize(
    "place",
    [
        in_a_finalizer,
        in_a_callback_of_a_weakref,
        in_the_garbage_collector,
        in_the_finalizer_of_a_finalizer,
    ],
)
@pytest.mark.parametrize(
    ("signum", "error"), [(signal.SIGTERM, RankStopped), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_is_not_lost_where_python_drops_errors(
    place: Callable[[Callable[[], object]], None], signum: int, error: type[BaseException]
) -> None:
    came = []

    def tell() -> None:
        came.append(True)
        signal.raise_signal(signum)
        came.append(False)  # the handler has raised

    with pytest.raises(error):
        go_on_after(lambda: place(tell))
    assert came == [True]


def test_cleaning_up_is_not_interrupted_by_another_signal() -> None:
    with pytest.raises(RankStopped):
        go_on_after(lambda: os.kill(os.getpid(), signal.SIGTERM))
    in_a_finalizer(lambda: os.kill(os.getpid(), signal.SIGTERM))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)


def test_other_errors_that_python_drops_are_shown_as_ever(
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_a_finalizer(lambda: 1 / 0)
    assert "ZeroDivisionError" in capsys.readouterr().err
