"""async_save: what is saved is the state at the call, and no error is lost."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_runs import Mixed, adamw, assert_same, load_plain, plain_after, small, trained
from clusters import Simulated
from file_operations import Hook, Operation, watched
from flat_shards import FlatShards, step_with

import phalanx
from phalanx import (
    Backend,
    CheckpointIOError,
    CollectiveTimeoutError,
    SimulatedBackend,
    all_reduce,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from phalanx.checkpoint.async_saves import wait_for_latest


def held_until(event: threading.Event) -> Hook:
    """Files are written only once the event has come."""

    def hook(operation: Operation) -> None:
        if operation.name == "write" and "safetensors" in operation.path:
            assert event.wait(20)

    return hook


def no_space(operation: Operation) -> None:
    if operation.name == "write" and "safetensors" in operation.path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_goes_on_while_it_is_written(folder: Path) -> None:
    on_its_way = threading.Event()

    def run(backend: Backend) -> None:
        model = FlatShards(Mixed(), backend)
        optimizer = trained(model, steps=2)
        pending = save_checkpoint(folder, model=model, optimizer=optimizer, step=2, async_save=True)
        for seed in range(2, 5):  # changes everything in place, and talks to the others
            step_with(model, optimizer, seed)
            all_reduce(torch.ones(3), backend)
        model.module.get_buffer("mask").logical_not_()
        backend.barrier()
        assert not pending.done()
        assert "being written" in repr(pending)
        assert latest_checkpoint(folder) is None
        with pytest.raises(CollectiveTimeoutError, match="still being written"):
            pending.wait(timeout=0.001)
        backend.barrier()
        on_its_way.set()
        assert pending.wait() == pending.folder == latest_checkpoint(folder)
        assert pending.done()

    with watched(str(folder), held_until(on_its_way)):
        Simulated().run(run, 2)
    assert_same(load_plain(folder), plain_after(2))


def test_a_later_save_waits_for_an_earlier_one(folder: Path) -> None:
    def run(backend: Backend) -> None:
        model = FlatShards(Mixed(), backend)
        optimizer = adamw(model)
        pending = []
        for steps in range(5):
            step_with(model, optimizer, steps)
            pending.append(
                save_checkpoint(
                    folder,
                    model=model,
                    optimizer=optimizer,
                    step=steps + 1,
                    async_save=steps < 4,
                    keep=None,
                )
            )
            assert all(earlier.done() for earlier in pending[:-1])
        assert [each.wait().name for each in pending] == [
            f"{number:06}-step-{number}" for number in range(1, 6)
        ]

    Simulated().run(run, 3)
    for steps in range(1, 6):
        assert_same(load_plain(folder, step=steps), plain_after(steps))


def test_saves_without_a_backend_wait_for_each_other_too(folder: Path) -> None:
    model = small()
    pending = [save_checkpoint(folder, model=model, step=n, async_save=True) for n in range(4)]
    assert [each.wait().name for each in pending][-1] == "000004-step-3"
    assert latest_checkpoint(folder) == pending[-1].folder


def test_an_error_in_the_background_is_logged_and_raised_by_wait(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(backend: Backend) -> None:
        model = FlatShards(Mixed(), backend)
        pending = save_checkpoint(folder, model=model, step=5, async_save=True)
        for _ in range(2):
            with pytest.raises(CheckpointIOError, match="No space left") as caught:
                pending.wait()
            assert caught.value.errno == errno.ENOSPC
        assert "failed" in repr(pending)
        backend.barrier()

    with caplog.at_level(logging.ERROR, "phalanx"), watched(str(folder), no_space):
        Simulated().run(run, 2)
    assert "the checkpoint of step 5 was not saved" in caplog.text
    assert [path.name for path in folder.iterdir()] == [".phalanx-lock"]


def test_an_error_that_nobody_waited_for_is_raised_by_the_next_save_once(folder: Path) -> None:
    def run(backend: Backend) -> None:
        model = FlatShards(Mixed(), backend)
        pending = save_checkpoint(folder, model=model, step=1, async_save=True)
        if backend.rank == 0:  # that one rank has seen it is not enough
            with pytest.raises(CheckpointIOError):
                pending.wait()
        with pytest.raises(CheckpointIOError, match="the save before this one failed"):
            save_checkpoint(folder, model=model, step=2, async_save=True)
        failing.clear()
        backend.barrier()
        save_checkpoint(folder, model=model, step=3, async_save=True).wait()

    failing = ["yes"]
    with watched(str(folder), lambda operation: no_space(operation) if failing else None):
        Simulated().run(run, 2)
    assert load_checkpoint(folder).step == 3


def test_under_simulate_it_is_written_at_once(folder: Path) -> None:
    def run(backend: Backend) -> bool:
        model = FlatShards(small(), backend)
        return save_checkpoint(folder, model=model, step=1, async_save=True).done()

    assert phalanx.simulate(run, 3) == [True] * 3
    assert latest_checkpoint(folder) is not None


def test_a_load_waits_for_what_is_being_written(folder: Path) -> None:
    def run(backend: Backend) -> int:
        model = FlatShards(small(), backend)
        save_checkpoint(folder, model=model, step=7, async_save=True)
        return load_checkpoint(folder, model=model).step

    assert Simulated().run(run, 2) == [7, 7]


def test_a_save_is_waited_for_however_many_collectives_there_were_meanwhile(folder: Path) -> None:
    """Plans are dropped when there are more than a backend remembers; a save is not."""
    with SimulatedBackend.create_group(1)[0] as backend:
        model = FlatShards(Mixed(), backend)
        pending = save_checkpoint(folder, model=model, step=7, async_save=True)
        for count in range(2000):
            all_reduce(torch.empty(count), backend)
        assert wait_for_latest(backend) is pending


def test_a_backend_that_is_closed_meanwhile_is_an_error_and_not_a_checkpoint(folder: Path) -> None:
    closed, both = threading.Event(), threading.Barrier(2)

    def run(backend: Backend) -> str:
        pending = save_checkpoint(
            folder, model=FlatShards(small(), backend), step=7, async_save=True
        )
        backend.barrier()
        backend.close()
        both.wait(20)
        closed.set()
        with pytest.raises(phalanx.DistributedError) as caught:
            pending.wait()
        return str(caught.value)

    with watched(str(folder), held_until(closed)):
        assert all("closed" in text for text in Simulated().run(run, 2))
    assert latest_checkpoint(folder) is None
