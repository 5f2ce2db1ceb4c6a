"""all_to_all, all_to_all_uneven: what rank s has for rank d is what rank d has from rank s."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clusters import Cluster
from collective_reference import any_dtype, same, seeds, sizes, values_of
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx import Backend, DistributedError, SizeMismatchError, simulate

ways = st.sampled_from(["auto", "direct", "pairwise"])
rests = st.sampled_from([(), (3,), (0,), (2, 2)])
PROMPT = 15.0  # seconds after which a rank that was not told gives up, with an error that shows it


@settings(max_examples=examples(60))
@given(sizes, ways, any_dtype, st.integers(0, 4), rests, seeds)
def test_slice_d_of_rank_s_is_slice_s_of_rank_ds_result(
    size: int, algorithm: str, dtype: torch.dtype, rows: int, rest: tuple[int, ...], seed: int
) -> None:
    values = [values_of((size * rows, *rest), dtype, rank, seed) for rank in range(size)]

    def run(backend: Backend) -> None:
        own = slice(backend.rank * rows, (backend.rank + 1) * rows)
        expected = torch.cat([value[own] for value in values])
        mine = values[backend.rank].clone()
        strided = torch.stack([mine, mine], dim=-1)[..., 0]
        into, strided_into = torch.empty_like(mine), torch.stack([mine, mine], dim=-1)[..., 1]
        pending = phalanx.async_all_to_all(mine, backend, algorithm=algorithm)
        assert phalanx.all_to_all(strided, backend, algorithm=algorithm, into=into) is into
        phalanx.all_to_all(mine, backend, algorithm=algorithm, into=strided_into)
        result = phalanx.all_to_all(strided, backend, algorithm=algorithm)
        assert same(mine, values[backend.rank])
        twice = phalanx.all_to_all(result, backend, algorithm=algorithm)
        assert same(twice, mine), "exchanged twice, everything is back"
        assert phalanx.all_to_all(mine, backend, algorithm=algorithm, into=mine) is mine
        for each in (result, pending.wait(), into, strided_into, mine):
            assert same(each, expected)

    simulate(run, size, seed)


@settings(max_examples=examples(60))
@given(st.data(), sizes, ways, any_dtype, rests, seeds)
def test_uneven_rows_arrive_in_rank_order_however_many_there_are(
    data: st.DataObject,
    size: int,
    algorithm: str,
    dtype: torch.dtype,
    rest: tuple[int, ...],
    seed: int,
) -> None:
    counts = [data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))] * size
    counts = [row[s:] + row[:s] for s, row in enumerate(counts)]  # [from][to]
    values = [values_of((sum(counts[s]), *rest), dtype, s, seed) for s in range(size)]

    def run(backend: Backend) -> None:
        rank = backend.rank
        send, recv = counts[rank], [counts[s][rank] for s in range(size)]
        expected = torch.cat([values[s].split(counts[s])[rank] for s in range(size)])
        mine = values[rank].clone()
        into = torch.empty_like(expected)
        option = {"algorithm": algorithm}
        strided = torch.stack([mine, mine], dim=-1)[..., 0]
        pending = phalanx.async_all_to_all_uneven(mine, backend, send, recv, **option)  # type: ignore[arg-type]
        result = phalanx.all_to_all_uneven(strided, backend, tuple(send), recv, **option)  # type: ignore[arg-type]
        placed = phalanx.all_to_all_uneven(mine, backend, send, recv, into=into, **option)  # type: ignore[arg-type]
        back = phalanx.all_to_all_uneven(result, backend, recv, send, **option)  # type: ignore[arg-type]
        assert placed is into
        assert same(mine, values[rank])
        assert same(back, mine), "sent back, everything is where it was"
        for each in (result, pending.wait(), into):
            assert same(each, expected)

    simulate(run, size, seed)


def test_sizes_may_be_elements_of_tensors_or_any_whole_numbers() -> None:
    def run(backend: Backend) -> list[float]:
        sizes = torch.tensor([1, 1, 1])
        mine = torch.arange(3.0) + 3 * backend.rank
        return phalanx.all_to_all_uneven(mine, backend, list(sizes), (1, True, sizes[0])).tolist()

    assert simulate(run, 3)[1] == [1.0, 4.0, 7.0]


MISMATCHES = {
    "one row too many": (3, 2),
    "one row too few": (1, 2),
    "rows for one who expects none": (1, 0),
    "no rows for one who expects some": (0, 1),
}


@pytest.mark.checkered
@pytest.mark.parametrize("sizes", MISMATCHES.values(), ids=MISMATCHES.keys())
@pytest.mark.parametrize("size", [2, 4])
def test_sizes_that_do_not_match_are_an_error_on_both_ranks_that_names_them(
    cluster: Cluster, sizes: tuple[int, int], size: int
) -> None:
    """Rank 0 sends rank 1 another number of rows than that expects; the others learn of it."""
    sent, expected = sizes

    def run(backend: Backend) -> DistributedError:
        backend.barrier()
        send, recv = [1] * size, [1] * size
        if backend.rank == 0:
            send[1] = sent
        if backend.rank == 1:
            recv[0] = expected

        def call() -> None:
            phalanx.all_to_all_uneven(torch.ones(sum(send), 2), backend, send, recv)
            backend.barrier()  # who has nothing to do with those two may learn at its next call

        with pytest.raises(SizeMismatchError) as info:
            call()
        return info.value

    errors = cluster.run(run, size, timeout=PROMPT)
    for error in errors[:2]:
        assert f"rank 0 sends {sent} rows to rank 1, which expects {expected}" in str(error)
        assert "all_to_all_uneven #1" in str(error)
        assert (error.op, error.sequence) == ("all_to_all_uneven", 1)
    assert {errors[0].peer, errors[1].peer} <= {0, 1}


def test_a_mismatch_both_ways_is_told_in_one_message() -> None:
    def run(backend: Backend) -> str:
        send, recv = ([1, 2], [1, 3]) if backend.rank == 0 else ([4, 1], [5, 1])
        with pytest.raises(SizeMismatchError) as info:
            phalanx.all_to_all_uneven(torch.ones(sum(send)), backend, send, recv)
        return str(info.value)

    for text in simulate(run, 2):
        assert "rank 0 sends 2 rows to rank 1, which expects 5" in text
        assert "rank 1 sends 4 rows to rank 0, which expects 3" in text


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda b: phalanx.all_to_all(torch.ones(4), b), SizeMismatchError, r"3 slices.*\[4\]"),
        (lambda b: phalanx.all_to_all(torch.ones(()), b), SizeMismatchError, r"3 slices.*\[\]"),
        (
            lambda b: phalanx.all_to_all(torch.ones(3), b, into=torch.ones(4)),
            SizeMismatchError,
            "the result is",
        ),
        (
            lambda b: phalanx.all_to_all_uneven(torch.ones(3), b, [1, 1], [1, 1, 1]),
            SizeMismatchError,
            r"send_sizes=\[1, 1\].*3 ranks",
        ),
        (
            lambda b: phalanx.all_to_all_uneven(torch.ones(3), b, [1, 1, 1], [3, 1, -1]),
            SizeMismatchError,
            r"recv_sizes=.*0 or more",
        ),
        (
            lambda b: phalanx.all_to_all_uneven(torch.ones(4), b, [1, 1, 1], [1, 1, 1]),
            SizeMismatchError,
            r"are 3 rows, and a tensor of shape \[4\] has 4",
        ),
        (
            lambda b: phalanx.all_to_all_uneven(torch.ones(()), b, [0, 0, 0], [0, 0, 0]),
            SizeMismatchError,
            r"are 0 rows, and a tensor of shape \[\] has none",
        ),
        (
            lambda b: phalanx.all_to_all_uneven(torch.ones(3), b, [1, 1, 1], [2, 1, 1]),
            SizeMismatchError,
            "1 rows for this rank itself, and recv_sizes 2",
        ),
        (
            lambda b: phalanx.all_to_all_uneven(torch.ones(3), b, [1.0, 1, 1], [1, 1, 1]),
            TypeError,
            "whole numbers",
        ),
        (
            lambda b: phalanx.all_to_all_uneven(torch.ones(3), b, None, [1, 1, 1]),
            TypeError,
            "whole numbers",
        ),
        (
            lambda b: phalanx.all_to_all_uneven(
                torch.ones(3), b, [1, 1, 1], [1, 1, 1], into=torch.ones(4)
            ),
            SizeMismatchError,
            "the result is",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(
    call: Callable[[Backend], object], error: type[Exception], match: str
) -> None:
    def run(backend: Backend) -> float:
        if backend.rank == 0:
            with pytest.raises(error, match=match) as info:
                call(backend)
            assert str(info.value).startswith("rank 0: all_to_all")
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 3) == [3.0] * 3


def test_rows_of_other_shapes_or_dtypes_are_a_disagreement(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        mine = torch.ones(2, 3 - backend.rank)
        with pytest.raises(phalanx.DesyncError):
            phalanx.all_to_all_uneven(mine, backend, [1, 1], [1, 1])

    cluster.run(run, 2, timeout=PROMPT)
