"""Quantization: unbiased if rounded at random, bounded if not, and at most twice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from members import average, buckets_of, noise

from phalanx import Quantized
from phalanx.compression.quantized import bits_of, numbers_of, pack_bits, unpack_bits


def assert_unbiased(draws: torch.Tensor, expected: torch.Tensor) -> None:
    """The mean over rows is within 4.5 standard errors, for each value."""
    error = draws.double().std(0).clamp(min=1e-5) / math.sqrt(len(draws))
    off = (draws.double().mean(0) - expected) / error
    assert off.abs().max() < 4.5
    assert off.mean().abs() < 4.5 / math.sqrt(len(off))  # and on the whole there is no trend


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_rounding_at_random_is_unbiased(bits: int):
    block = noise(64)
    compressor = Quantized(bits, block=64, seed=3)
    times = block.repeat(4000, 1)  # as many blocks, each with random numbers of its own
    assert_unbiased(compressor.decompress(compressor.compress(times)), block)


def test_so_is_rounding_in_call_after_call():
    compressor, block = Quantized(4, seed=3), noise(16)
    calls = [compressor.decompress(compressor.compress(block)) for _ in range(500)]
    assert_unbiased(torch.stack(calls), block)


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("bits", [8, 4, 1])
def test_so_are_averages_which_are_rounded_twice(bits: int, p: int):
    blocks = [noise(16, seed=member) for member in range(p)]
    given = [[block.repeat(3000, 1)] for block in blocks]
    found = average([Quantized(bits, block=16, seed=1) for _ in range(p)], buckets_of(given))[0]
    assert_unbiased(found.view(3000, 16), sum(block.double() for block in blocks) / p)


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
def test_rounding_to_nearest_is_off_by_half_a_step_at_most(bits: int, most: int):
    values = noise(10, 16) * torch.logspace(-20, 20, 10).unsqueeze(1)
    compressor = Quantized(bits, block=16, stochastic=False)
    off = (compressor.decompress(compressor.compress(values)) - values).abs()
    step = values.abs().amax(1, keepdim=True) / most
    assert (off <= 0.5001 * step).all()


def test_one_bit_is_a_sign_times_the_mean_magnitude_of_its_block():
    values = torch.tensor([1.0, -3.0, 2.0, -2.0, 5.0, 7.0])
    compressor = Quantized(1, block=4, stochastic=False)
    assert compressor.decompress(compressor.compress(values)).tolist() == [2, -2, 2, -2, 6, 6]


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_blocks_do_not_look_at_each_other(bits: int):
    values = torch.cat([torch.full((32,), 1e-6), torch.full((32,), 1e6), torch.zeros(32)])
    compressor = Quantized(bits, block=32)
    back = compressor.decompress(compressor.compress(values))
    if bits > 1:
        torch.testing.assert_close(back, values, rtol=1e-6, atol=0)
    assert back[64:].tolist() == [0.0] * 32


@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_value_that_is_not_finite_is_nan_and_no_other(bits: int, bad: float):
    values = noise(64)
    values[40] = bad
    compressor = Quantized(bits, block=32)
    back = compressor.decompress(compressor.compress(values))
    assert back[:32].isfinite().all()
    assert back[32:].isnan().all()


@pytest.mark.checkered
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 7, 8, 9, 250])
def test_sizes_that_blocks_and_bytes_do_not_divide_are_whole(n: int, bits: int, stochastic: bool):
    values = noise(n)
    compressor = Quantized(bits, block=4, stochastic=stochastic)
    message = compressor.compress(values)
    assert message.nbytes == 4 * -(-n // 4) + -(-bits * n // 8)
    off = (compressor.decompress(message) - values).abs()
    assert (off <= 2 * values.abs().max() / {8: 127, 4: 7, 1: 1}[bits]).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_one_huge_value_takes_its_block_s_precision_and_no_other_s(bits: int):
    values = torch.ones(8)
    values[1] = 1e30
    compressor = Quantized(bits, block=4, stochastic=False)
    back = compressor.decompress(compressor.compress(values))
    torch.testing.assert_close(back, torch.tensor([0, 1e30, 0, 0, 1, 1, 1, 1]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_the_smallest_and_largest_numbers_stay_finite(bits: int):
    for values in (torch.full((5,), 1e-45), torch.full((5,), -1e-39), torch.tensor([3e38, -1e38])):
        compressor = Quantized(bits, block=4)
        off = compressor.decompress(compressor.compress(values)) - values
        assert (off.abs() <= 2 * values.abs().max()).all()


def test_random_numbers_differ_from_call_to_call_and_from_member_to_member():
    values = torch.full((64,), 0.3)
    values[0] = 1
    compressor = Quantized(4)
    first, second = (compressor.decompress(compressor.compress(values)) for _ in range(2))
    assert not torch.equal(first, second)
    same = [[values], [values.clone()]]
    mean = average([Quantized(1), Quantized(1)], buckets_of(same))[0]
    assert len(mean.unique()) > 1


@given(st.integers(0, 20), st.integers(0, 40), st.integers(0, 99))
def test_numbers_of_a_few_bits_survive_packing(width: int, count: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << width, (count,), generator=draw)
    packed = pack_bits(bits_of(numbers, width))
    assert packed.numel() == -(-count * width // 8)
    assert torch.equal(numbers_of(unpack_bits(packed, count * width), width, count), numbers)
    rows = torch.randint(0, 2, (3, count), generator=draw, dtype=torch.uint8)
    assert torch.equal(unpack_bits(pack_bits(rows), count), rows)
