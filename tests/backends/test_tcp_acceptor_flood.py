"""A job forms with a crowd of callers at its acceptor: `acceptor_flood.py`, shortened."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from listening import listening, needs_proc
from strangers import Crowd
from test_tcp_rendezvous import Start, place, start, works  # noqa: F401
from waiting import wait_until

KINDS = {
    "of all kinds": {"idle": 100, "partial": 60, "garbage": 40},
    "that know the job": {"idle": 0, "partial": 0, "garbage": 0, "hello": 200},
}


@contextmanager
def crowd_at(address: tuple[str, int], **options: int) -> Iterator[Crowd]:
    """They are there when this begins, and mingle meanwhile."""
    crowd = Crowd(address, insistent=True, **options)
    assert crowd.calls == crowd.size
    enough = threading.Event()

    def mingle() -> None:
        while not enough.is_set():
            crowd.mingle(0.02)

    thread = threading.Thread(target=mingle, daemon=True)
    thread.start()
    try:
        yield crowd
    finally:
        enough.set()
        thread.join()
        left = crowd.left()
        crowd.close()
    assert left == 0, f"{left} of {crowd.calls} callers are still connected"


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
def test_a_job_forms_with_a_crowd_in_front_of_rank_0(
    start: Start,  # noqa: F811
    kinds: dict[str, int],
) -> None:
    listener, address = place()
    listener.listen(4096)
    with crowd_at(listener.getsockname(), **kinds):
        works(
            *[start(rank, 4, address, listener=listener if not rank else None) for rank in range(4)]
        )


@needs_proc
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
def test_a_job_forms_with_a_crowd_in_front_of_another_rank(
    start: Start,  # noqa: F811
    kinds: dict[str, int],
) -> None:
    """Its callers know that it is there: only a refused connection tells them that it is gone."""
    before = listening()
    listener, address = place()
    zero, one = start(0, 4, address, listener=listener), start(1, 4, address)
    places = wait_until(lambda: listening() - before - {listener.getsockname()})
    with crowd_at(places.pop(), **kinds):
        works(zero, one, start(2, 4, address), start(3, 4, address))
