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

pytestmark = pytest.mark.usefixtures("asking_soon")


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


def test_both_are_told_both_calls_and_both_lines(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> tuple[str, str, str, str]:
        for _ in range(3):
            backend.barrier()
        group = suffix(backend)
        if backend.rank == 0:
            mine = f"all_reduce #3 (float32 [32, 32], sum, ring){group} at {next_line()}"
            error = told(lambda: phalanx.all_reduce(torch.ones(32, 32), backend, algorithm="ring"))
        else:
            mine = f"broadcast #3 (int64 [10], root 0, tree){group} at {next_line()}"
            error = told(lambda: phalanx.broadcast(torch.arange(10), backend, algorithm="tree"))
        other = 1 - backend.rank
        assert (error.peer, error.sequence) == (other, 3)
        return mine, str(error), named(backend, other), error.op or ""

    (call, text, peer, op), (other, other_text, other_peer, other_op) = cluster.run(
        disagree, 2, timeout=PROMPT
    )
    assert text == f"rank 0: {call} met {other} from rank {peer}"
    assert other_text == f"rank 1: {other} met {call} from rank {other_peer}"
    assert (op, other_op) == ("all_reduce", "broadcast")


def test_the_others_are_told_which_two_met(cluster: Cluster) -> None:
    """A ring of four: one neighbour of the odd one meets it first, the other has to be told."""

    def disagree(backend: Backend) -> tuple[str, str, list[str]]:
        names = [named(backend, rank) for rank in range(4)]
        op = phalanx.ReduceOp.MAX
        if backend.rank == 2:
            mine = next_line()
            error = told(lambda: phalanx.all_reduce(ONES, backend, op, algorithm="ring"))
        else:
            mine = next_line()
            error = told(lambda: phalanx.all_reduce(ONES, backend, algorithm="ring"))
        return mine, str(error), names

    results = cluster.run(disagree, 4, timeout=PROMPT)
    lines = [line for line, _, _ in results]
    pair = re.compile(r"on rank (\d)(?: \(rank \d of the job\))? .* from rank (\d)")
    heard = [pair.search(text) for _, text, _ in results]
    assert not all(heard), "whoever met the other one says so in the first person"
    for rank, (mine, text, names) in enumerate(results):
        ours, odd = re.escape(f"at {lines[0]}"), re.escape(f"at {lines[2]}")
        assert re.search(f"{ours} met .*{odd}|{odd} met .*{ours}", text), text
        assert f"at {mine}" in text
        assert text.startswith(f"rank {rank}: all_reduce #0 (float32 [8], ")
        found = heard[rank]
        if found is not None:
            met, other = map(int, found.groups())
            assert 2 in (met, other), text
            assert rank not in (met, other)
            assert f"on rank {names[met]} all_reduce #0" in text
            assert text.endswith(f" from rank {names[other]}")


@pytest.mark.requires("mismatches")
def test_a_later_call_says_what_broke_the_group_and_what_was_called_now(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> None:
        call = phalanx.all_reduce if backend.rank else phalanx.all_gather
        reason = str(told(lambda: call(ONES, backend))).removeprefix(f"rank {backend.rank}: ")
        line = next_line()
        later = told(lambda: phalanx.barrier(backend))
        assert str(later) == (
            f"rank {backend.rank}: barrier #1{suffix(backend)} at {line}: the group is broken: "
            f"{reason}"
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
    for rank, (_, text) in enumerate(results):
        assert re.search(f"at {lines[rank]} met .* at {lines[1 - rank]} from rank", text), text


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
