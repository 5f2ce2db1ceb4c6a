"""A rank that stops while others write files is known when these are written, and not later."""

from __future__ import annotations

import threading
from time import monotonic

import pytest
from clusters import SharedMemory, Tcp

from phalanx import Backend, PeerLostError
from phalanx.checkpoint.group import CheckpointGroup
from phalanx.transport.tcp import heartbeat

PATIENCE = 30.0


@pytest.mark.parametrize("ranks", [Tcp(), SharedMemory()], ids=str)
def test_ranks_that_write_files_attend_to_the_others(
    ranks: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They all write until the group has failed: none is in a call that would notice."""
    monkeypatch.setenv(heartbeat.VARIABLE, "0.5")
    stopped = threading.Event()
    monkeypatch.setattr(heartbeat, "is_stopped", lambda process: stopped.is_set())

    def run(backend: Backend) -> None:
        def write() -> None:
            stopped.set()
            deadline = monotonic() + PATIENCE
            while backend.group.failure is None:
                assert monotonic() < deadline, "nobody has looked after the others"
                threading.Event().wait(0.01)

        with pytest.raises(PeerLostError, match="is stopped"):
            CheckpointGroup(backend, "save_checkpoint", None).on_all(write)

    ranks.run(run, 2)


def test_nobody_attends_any_more_when_it_is_over() -> None:
    def run(backend: Backend) -> list[int]:
        return CheckpointGroup(backend, "save_checkpoint", None).on_all(lambda: backend.rank)

    assert Tcp().run(run, 2) == [[0, 1]] * 2
    assert not [one for one in threading.enumerate() if "attends" in one.name]
