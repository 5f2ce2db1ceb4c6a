"""Reductions in shared memory: the same bits on every rank, and as `direct` gives anywhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import pytest
import torch
from clusters import Cluster, SharedMemory, Simulated, SubOf, Tcp
from torch import Tensor

import phalanx
from phalanx import Backend, ReduceOp

REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
PARTS = {torch.complex64: torch.float32, torch.complex32: torch.float16}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
# Not products of complex numbers: torch rounds those at the end of a run of elements differently.
COMPLEX = (ReduceOp.SUM, ReduceOp.MEAN)
LENGTHS = (12, 420, 1212)  # small; a piece; several, the last of them short
REDUCE: dict[str, Callable[..., Tensor | None]] = {
    "all_reduce": phalanx.all_reduce,
    "reduce_scatter": phalanx.reduce_scatter,
    "reduce": lambda tensor, backend, **how: phalanx.reduce(tensor, backend, 1, **how),
}
DTYPES: dict[torch.dtype, tuple[ReduceOp, ...]] = {
    **{dtype: tuple(op for op in ReduceOp if op not in BITWISE) for dtype in REAL},
    **{dtype: tuple(ReduceOp) for dtype in WHOLE},
    torch.bool: tuple(op for op in ReduceOp if op is not ReduceOp.MEAN),
    torch.complex64: COMPLEX,
    torch.complex32: COMPLEX,
}


pytestmark = pytest.mark.usefixtures("short_pieces")


def values(length: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Whatever bits; of floating-point numbers such that the order of a sum shows."""
    generator = torch.Generator().manual_seed(length * 10 + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (length,), generator=generator).bool()
    if dtype in WHOLE:
        bits = torch.randint(0, 256, (length * dtype.itemsize,), generator=generator)
        return bits.to(torch.uint8).view(dtype)
    parts = length * (2 if dtype.is_complex else 1)
    numbers = torch.randn(parts, generator=generator) * 2.0 ** torch.randint(
        -6, 6, (parts,), generator=generator
    )
    if (
        not dtype.is_complex
    ):  # torch multiplies what is added by 1 + 0i, which changes some of these
        numbers[3 + rank], numbers[8 + rank % 2], numbers[7] = float("nan"), float("inf"), -0.0
    return numbers.to(PARTS.get(dtype, dtype)).view(dtype)


def reductions(dtype: torch.dtype) -> Iterator[tuple[str, ReduceOp, int]]:
    for op in DTYPES[dtype]:
        for name in REDUCE if op is ReduceOp.SUM else ("all_reduce", "reduce_scatter"):
            for length in LENGTHS:
                yield name, op, length


def fingerprint(result: Tensor | None) -> str:
    """A hash of all bits, but for those of what is no number: there torch's vary with alignment."""
    if result is None:
        return ""
    real = result.view(PARTS[result.dtype]) if result.dtype in PARTS else result
    if real.is_floating_point():
        real[real.isnan()] = float("nan")
    return hashlib.blake2b(bytes(real.view(torch.uint8).numpy()), digest_size=8).hexdigest()


def bits_of(
    cluster: Cluster, size: int, dtype: torch.dtype, *, registered: bool
) -> list[list[str]]:
    """For each rank, a hash of each result."""

    def run(backend: Backend) -> list[str]:
        results = []
        for name, op, length in reductions(dtype):
            given = values(length, dtype, backend.rank)
            mine = backend.empty(length, dtype=dtype) if registered else torch.empty_like(given)
            mine.copy_(given)
            result = REDUCE[name](mine, backend, op=op, reproducible=True)
            results.append(fingerprint(result))
        return results

    return cluster.run(run, size)


@pytest.mark.checkered
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_the_bits_are_those_of_every_other_backend(size: int, dtype: torch.dtype) -> None:
    simulated = bits_of(Simulated(), size, dtype, registered=False)
    for registered in (False, True):
        assert bits_of(SharedMemory(), size, dtype, registered=registered) == simulated
    for number, (name, _, _) in enumerate(reductions(dtype)):
        if name == "all_reduce":
            assert len({results[number] for results in simulated}) == 1
    if dtype in (torch.float32, torch.bfloat16):
        assert bits_of(Tcp(), size, dtype, registered=True) == simulated
        assert bits_of(SubOf(SharedMemory()), size, dtype, registered=True) == simulated
