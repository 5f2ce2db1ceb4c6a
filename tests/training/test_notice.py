"""A notice that one rank gets is answered on all of them, in the same call of `given()`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import Cluster, Simulated
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import phalanx
from phalanx import (
    Backend,
    DeadlockError,
    MisuseError,
    Notice,
    PeerLostError,
    SimulatedBackend,
    all_reduce_,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    simulate,
)
from phalanx.training.notice import MOST_CALLS

TEMPFAIL = 75
STEPS = 20


def until_given(
    told: dict[int, int], *, every: float = 0.0, steps: int = STEPS
) -> Callable[[Backend], int]:
    """A loop whose rank r gets its notice in step `told[r]`; how many steps it took."""

    def loop(backend: Backend) -> int:
        tensor = torch.ones(3)
        with Notice(backend, signals=(), every=every) as notice:
            for step in range(steps):
                if told.get(backend.rank) == step:
                    notice.give()
                all_reduce_(tensor, backend)
                if notice.given():
                    assert notice.given(), "it stays given"
                    assert notice.exit_code == TEMPFAIL
                    return step + 1
        assert notice.exit_code == 0
        return steps

    return loop


def test_all_ranks_leave_one_step_after_the_one_in_which_a_rank_got_notice(
    cluster: Cluster,
) -> None:
    assert cluster.run(until_given({1: 5}), 3) == [7, 7, 7]


def test_without_a_notice_the_loop_comes_to_its_end() -> None:
    assert simulate(until_given({}), 3) == [STEPS] * 3


@given(
    told=st.dictionaries(st.integers(0, 2), st.integers(0, STEPS - 3), min_size=1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(20), deadline=None)
def test_the_first_notice_counts_whoever_gets_it(told: dict[int, int], seed: int) -> None:
    assert simulate(until_given(told), 3, seed) == [min(told.values()) + 2] * 3


def test_where_steps_are_short_most_calls_exchange_nothing() -> None:
    """A thousand seconds do not pass here, so it is as rare as it may be."""
    issued = []

    def loop(backend: Backend) -> int:
        with Notice(backend, signals=(), every=1000.0) as notice:
            for step in range(10 * MOST_CALLS):
                if backend.rank == 1 and step == 5 * MOST_CALLS:
                    notice.give()
                if notice.given():
                    break
        issued.append(len(backend.engine.history.calls))
        return step

    last = simulate(loop, 3)
    assert last == [last[0]] * 3
    assert 5 * MOST_CALLS < last[0] <= 6 * MOST_CALLS + 1
    assert issued[0] <= 8


def test_a_rank_by_itself_leaves_at_once() -> None:
    assert simulate(until_given({0: 5}), 1) == [6]


def test_a_notice_in_the_last_step_is_not_answered_and_nobody_waits() -> None:
    assert simulate(until_given({1: STEPS - 1}), 3) == [STEPS] * 3


def test_the_log_names_the_rank_that_got_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        simulate(until_given({2: 5}), 4)
    assert caplog.messages == ["rank 2 was given notice to leave: all 4 ranks leave now"]


# ------------------------------------------------------------------------------
# What a notice is for: leave, and go on from the checkpoint.

LONG = 12


def train(folder: Path, told: dict[int, int]) -> Callable[[Backend], tuple[int, torch.Tensor]]:
    """Train to `LONG` steps or a notice; the exit code and the weights."""

    def run(backend: Backend) -> tuple[int, torch.Tensor]:
        torch.manual_seed(0)
        model = phalanx.DDP(nn.Linear(4, 4), backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        first = 0
        if latest_checkpoint(folder) is not None:
            first = load_checkpoint(folder, model=model, optimizer=optimizer).step
        with Notice(backend, signals=(), every=0.0) as notice:
            for step in range(first, LONG):
                if told.get(backend.rank) == step:
                    notice.give()
                optimizer.zero_grad()
                model(torch.randn(2, 4)).square().sum().backward()  # drawn by each rank
                optimizer.step()
                if notice.given():
                    save_checkpoint(folder, model=model, optimizer=optimizer, step=step + 1)
                    break
        return notice.exit_code, torch.cat([p.detach().flatten() for p in model.parameters()])

    return run


def test_a_run_that_goes_on_has_the_weights_of_one_that_was_never_interrupted(
    tmp_path: Path,
) -> None:
    whole = simulate(train(tmp_path / "whole", {}), 2)
    parts = tmp_path / "parts"
    one, two, last = (simulate(train(parts, told), 2) for told in ({1: 2}, {0: 7, 1: 8}, {}))
    assert [code for run in (one, two, last) for code, _ in run] == [TEMPFAIL] * 4 + [0] * 2
    assert sorted(path.name for path in parts.iterdir() if path.is_dir()) == [
        "000001-step-4",
        "000002-step-9",
    ]
    for (_, weights), (_, expected) in zip(last, whole, strict=True):
        assert torch.equal(weights, expected)


# ------------------------------------------------------------------------------
# Ranks that fail, and ranks that do not do the same.


def test_a_rank_that_fails_between_two_steps_is_named_and_its_error_is_raised() -> None:
    errors = []

    def loop(backend: Backend) -> None:
        try:
            with Notice(backend, signals=(), every=0.0) as notice:
                for step in range(STEPS):
                    if backend.rank == 1 and step == 3:
                        raise ZeroDivisionError
                    notice.given()
        except PeerLostError as error:
            errors.append(error)
            raise

    with pytest.raises(ZeroDivisionError):
        Simulated().run(loop, 2)
    assert [error.peer for error in errors] == [1]
    assert "Notice.given()" in str(errors[0])


def test_ranks_that_call_it_unequally_often_are_told_where() -> None:
    def loop(backend: Backend) -> None:
        tensor = torch.ones(3)
        with Notice(backend, signals=(), every=0.0) as notice:
            for step in range(5):
                all_reduce_(tensor, backend)
                if step != 3 or backend.rank == 0:
                    notice.given()
                    notice.given()

    with pytest.raises(DeadlockError, match=r"all_reduce .*Notice\.given\(\)"):
        simulate(loop, 2)


def test_it_is_used_in_a_with_statement_one_at_a_time() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    notice = Notice(backend, signals=())
    with pytest.raises(MisuseError, match=r"given\(\) outside of the with statement"):
        notice.given()
    with notice, pytest.raises(MisuseError, match="in use already"), notice:
        pass


@pytest.mark.parametrize(
    "signals",
    [signal.SIGTERM, [signal.SIGKILL], [signal.SIGTERM, signal.SIGSTOP], ["SIGTERM"], "TERM", [0]],
)
def test_what_is_no_signal_to_be_handled_is_refused(signals: Any) -> None:
    (backend,) = SimulatedBackend.create_group(1)
    with pytest.raises(ValueError, match="a list of signals that a program can handle"):
        Notice(backend, signals=signals)


def test_other_wrong_arguments_are_refused() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    for every in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="seconds between exchanges"):
            Notice(backend, signals=(), every=every)
    with pytest.raises(TypeError, match="takes a backend"):
        Notice(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_another_thread_cannot_have_signals() -> None:
    with pytest.raises(MisuseError, match=r"main thread.*signals=\(\).*give\(\)"):
        simulate(Notice, 1)
