"""What ranks that disagree are told, word for word: both calls, both lines, and who was where."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clusters import Cluster
from torch import nn

import phalanx
from phalanx import Backend, DesyncError, SubBackend

PROMPT = 15.0
ONES = torch.ones(8)

pytestmark = pytest.mark.usefixtures("asking_soon", "answered")


def next_line(after: int = 1) -> str:
    """The line below the caller's, as messages name it."""
    frame = sys._getframe(1)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno + after}"


def told(call: Callable[[], object]) -> DesyncError:
    """The error of a call that meets another one."""
    with pytest.raises(DesyncError) as info:
        call()
    return info.value


def in_job(backend: Backend, rank: int) -> int:
    """A rank of this group as a rank of the job."""
    while isinstance(backend, SubBackend):
        rank, backend = backend.to_global(rank), backend.parent
    return rank


def named(backend: Backend, rank: int) -> str:
    whole = in_job(backend, rank)
    return str(rank) if whole == rank else f"{rank} (rank {whole} of the job)"


def suffix(backend: Backend) -> str:
    ranks = [in_job(backend, rank) for rank in range(backend.world_size)]
    return f" in the group of ranks {ranks}" if isinstance(backend, SubBackend) else ""


def disagreement(backend: Backend, number: int, calls: dict[int, str]) -> str:
    """What is told of two ranks of this group, with the call of each."""
    (first, one), (second, other) = sorted(calls.items())
    names = named(backend, first), named(backend, second)
    return (
        f"two ranks disagree in collective #{number}:\n"
        f"  rank {names[0]} called {one}\n"
        f"  rank {names[1]} called {other}"
    )


def test_both_are_told_both_calls_and_both_lines(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> tuple[str, str, str]:
        for _ in range(3):
            backend.barrier()
        group = suffix(backend)
        if backend.rank == 0:
            mine = f"all_reduce #3 (float32 [32, 32], sum, ring){group} at {next_line()}"
            error = told(lambda: phalanx.all_reduce(torch.ones(32, 32), backend, algorithm="ring"))
        else:
            mine = f"broadcast #3 (int64 [10], root 0, tree){group} at {next_line()}"
            error = told(lambda: phalanx.broadcast(torch.arange(10), backend, algorithm="tree"))
        assert (error.peer, error.sequence) == (1 - backend.rank, 3)
        assert error.op == ("broadcast" if backend.rank else "all_reduce")
        prefix = f"rank {named(backend, backend.rank)}: "
        assert str(error).startswith(prefix)
        return (
            mine,
            str(error).removeprefix(prefix),
            disagreement(backend, 3, {0: "FIRST", 1: "SECOND"}),
        )

    results = cluster.run(disagree, 2, timeout=PROMPT)
    (call, _, _), (other, _, _) = results
    for _, text, form in results:
        assert text == form.replace("FIRST", call).replace("SECOND", other)


def test_the_others_are_told_which_two_disagree(cluster: Cluster) -> None:
    """A ring of four: one neighbour of the odd one meets it first, the other has to be told."""

    def disagree(backend: Backend) -> tuple[str, str, str, dict[int, str]]:
        op = phalanx.ReduceOp.MAX
        if backend.rank == 2:
            mine = next_line()
            error = told(lambda: phalanx.all_reduce(ONES, backend, op, algorithm="ring"))
        else:
            mine = next_line()
            error = told(lambda: phalanx.all_reduce(ONES, backend, algorithm="ring"))
        me = f"rank {named(backend, backend.rank)}: "
        assert str(error).startswith(me)
        forms = {
            other: disagreement(backend, 0, {2: "SECOND", other: "FIRST"}) for other in (0, 1, 3)
        }
        return mine, suffix(backend), str(error).removeprefix(me), forms

    results = cluster.run(disagree, 4, timeout=PROMPT)
    called = [
        f"all_reduce #0 (float32 [8], {'max' if rank == 2 else 'sum'}, ring){group} at {mine}"
        for rank, (mine, group, _, _) in enumerate(results)
    ]
    others = []
    for rank, (_, _, text, forms_of) in enumerate(results):
        forms = {
            pair: form.replace("FIRST", called[pair]).replace("SECOND", called[2])
            for pair, form in forms_of.items()
        }
        pair, form = next((pair, form) for pair, form in forms.items() if form in text)
        # A rank that comes later is told that the group is broken.
        before = re.escape(f"{called[rank]}: ") + "(the group is broken: )?"
        assert re.fullmatch(f"({before})?" + re.escape(form), text), text
        if rank not in (pair, 2):
            others.append(rank)
    assert others, "nobody was told of two others"


@pytest.mark.requires("agreement")
def test_a_function_that_only_some_ranks_call_is_told_by_its_name(cluster: Cluster) -> None:
    """With the remedy; a wrapper adds the causes that it knows."""

    def disagree(backend: Backend) -> str:
        model = phalanx.DDP(nn.Linear(2, 1), backend)
        if backend.rank == 1:
            return str(told(lambda: phalanx.mean([1.0], backend=backend)))
        return str(told(lambda: model(torch.ones(3, 2)).sum().backward()))

    for text in cluster.run(disagree, 2, timeout=PROMPT):
        _, first, second, remedy, *_ = text.split("\n")
        assert "DDP's pass 0" in first
        assert " in mean() at " in second
        assert remedy.startswith("all ranks of the group have to call mean(), at the same point")


@pytest.mark.requires("mismatches")
def test_a_later_call_says_what_broke_the_group_and_what_was_called_now(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> None:
        call = phalanx.all_reduce if backend.rank else phalanx.all_gather
        me = f"rank {named(backend, backend.rank)}: "
        reason = str(told(lambda: call(ONES, backend))).removeprefix(me)
        line = next_line()
        later = told(lambda: phalanx.barrier(backend))
        assert str(later) == (
            f"{me}barrier #1{suffix(backend)} at {line}: the group is broken: {reason}"
        )

    cluster.run(disagree, 2, timeout=PROMPT)


def test_without_strict_the_lines_may_differ(cluster: Cluster) -> None:
    def agree(backend: Backend) -> float:
        if backend.rank:
            return phalanx.all_reduce(torch.ones(1), backend).item()
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert cluster.run(agree, 2) == [2.0, 2.0]


def test_strict_compares_the_lines_too(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_STRICT", "1")

    def disagree(backend: Backend) -> tuple[str, str]:
        for _ in range(2):  # the same line twice, and one for all
            backend.barrier()
            phalanx.all_reduce(ONES, backend)
        if backend.rank:
            line = next_line()
            error = told(lambda: phalanx.all_reduce(ONES, backend))
        else:
            line = next_line()
            error = told(lambda: phalanx.all_reduce(ONES, backend))
        return line, str(error)

    results = cluster.run(disagree, 2, timeout=PROMPT)
    lines = [line for line, _ in results]
    for _, text in results:
        assert re.search(f"at {lines[0]}\n.* at {lines[1]}$", text), text


def test_for_what_a_backward_pass_sends_the_line_is_that_of_the_backward(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> tuple[str, str]:
        torch.manual_seed(0)
        model = phalanx.DDP(nn.Linear(3, 2), backend)
        if backend.rank == 0:
            loss = model(torch.ones(4, 3)).sum()
            line = next_line()
            error = told(lambda: torch.autograd.backward(loss))
        else:
            line = next_line()
            error = told(lambda: phalanx.all_gather(ONES, backend, algorithm="ring"))
        return line, str(error)

    (backward, its_text), (gather, other_text) = cluster.run(disagree, 2, timeout=PROMPT)
    for text in (its_text, other_text):
        assert f"at {backward}" in text
        assert f"at {gather}" in text


def test_code_without_a_file_has_a_line_all_the_same(cluster: Cluster) -> None:
    program = compile("\n\nresult = phalanx.all_reduce(ones, backend)", "<stdin>", "exec")

    def disagree(backend: Backend) -> str:
        names = {"phalanx": phalanx, "ones": ONES, "backend": backend}
        if backend.rank == 0:
            return str(told(lambda: exec(program, names)))
        return str(told(lambda: phalanx.all_gather(ONES, backend, algorithm="ring")))

    for text in cluster.run(disagree, 2, timeout=PROMPT):
        assert "at <stdin>:3" in text


@pytest.mark.requires("mismatches")
def test_the_line_is_the_innermost_of_the_users(cluster: Cluster) -> None:
    """Not that of the library function through which the user's code was called."""
    line = next_line(3)

    def average(values: torch.Tensor, backend: Backend) -> torch.Tensor:
        return phalanx.all_reduce(values, backend)

    def disagree(backend: Backend) -> str:
        called = torch.no_grad()(average) if backend.rank == 0 else phalanx.all_gather
        return str(told(lambda: called(ONES, backend)))

    for text in cluster.run(disagree, 2, timeout=PROMPT):
        assert f"at {line}" in text


def test_code_without_the_name_of_a_module_has_a_line_too() -> None:
    backend = phalanx.SimulatedBackend.create_group(1)[0]
    names = {"__name__": None, "phalanx": phalanx, "ones": ONES, "backend": backend}
    exec("result = phalanx.all_reduce(ones, backend)", names)
    assert names["result"] is not None
