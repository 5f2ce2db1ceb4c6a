"""Top-k messages: which values are taken, and what they cost on the wire."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx import (
    CompressedGradient,
    TopK,
    TopKCompressor,
    UnsupportedOperationError,
    compress_gradients,
    decompress_gradients,
)
from phalanx.compression.quantized import bits_of, pack_bits
from phalanx.compression.sparse import CODES, code_for, encoded_size
from phalanx.compression.top_k import SAMPLE, largest
from phalanx.errors import SizeMismatchError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def noise(n: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sorted_by_hand(values: torch.Tensor, k: int) -> list[int]:
    """By magnitude, NaN first; equal ones by index."""

    def place(index: int) -> tuple[bool, float, int]:
        value = float(values[index])
        return (not math.isnan(value), -abs(value) if not math.isnan(value) else 0.0, index)

    return sorted(sorted(range(len(values)), key=place)[:k])


def test_the_largest_magnitudes_are_sent_and_the_rest_are_zeros():
    gradient = torch.tensor([[0.1, -5.0, 0.3], [2.0, -0.2, 0.0]])
    message = TopK(0.34).compress(gradient)
    assert message.indices.tolist() == [1, 2, 3]
    assert message.values.tolist() == pytest.approx([-5.0, 0.3, 2.0])
    assert message.original_len == 6
    assert TopK(0.34).decompress(message).tolist() == [[0, -5.0, pytest.approx(0.3)], [2.0, 0, 0]]
    assert TopKCompressor is TopK


@pytest.mark.parametrize(
    ("n", "ratio", "k"),
    [(10, 0, 1), (10, 0.05, 1), (10, 0.1, 1), (10, 0.11, 2), (10, 1, 10), (1, 0, 1), (0, 0.5, 0)],
)
def test_k_is_n_times_ratio_rounded_up_and_at_least_one(n: int, ratio: float, k: int):
    assert len(TopK(ratio).compress(torch.ones(n)).values) == k


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan, math.inf])
def test_a_ratio_that_is_none_is_refused(ratio: float):
    with pytest.raises(ValueError, match="between 0 and 1"):
        TopK(ratio)


def test_of_equal_magnitudes_the_lowest_index_is_taken():
    gradient = torch.tensor([1.0, -2.0, 2.0, 1.0, -1.0, 2.0])
    assert TopK(0.5).compress(gradient).indices.tolist() == [1, 2, 5]
    assert TopK(0.6).compress(gradient).indices.tolist() == [0, 1, 2, 5]
    assert TopK(0.5).compress(torch.zeros(6)).indices.tolist() == [0, 1, 2]


def test_nan_counts_as_the_largest_and_infinity_comes_next():
    gradient = torch.tensor([3.0, math.inf, math.nan, -math.inf, 9.0, -math.nan])
    assert [TopK(k / 6).compress(gradient).indices.tolist() for k in (1, 2, 3, 4)] == [
        [2],
        [2, 5],
        [1, 2, 5],
        [1, 2, 3, 5],
    ]


@given(st.data(), st.sampled_from(DTYPES))
def test_selection_is_a_sort_by_magnitude_and_index(data, dtype: torch.dtype):
    special = [0.0, -0.0, 1.0, -1.0, 1e-40, math.inf, -math.inf, math.nan, 65504.0, 5e-8]
    number = st.sampled_from(special) | st.floats(-4, 4, width=16)
    values = torch.tensor(data.draw(st.lists(number, min_size=1, max_size=30)), dtype=dtype)
    k = data.draw(st.integers(0, len(values)))
    assert largest(values, k).tolist() == sorted_by_hand(values, k)


def _columns(n: int) -> torch.Tensor:
    """Every place that a sample would look at is large, and no other one is."""
    values = noise(n)
    values[:: n // SAMPLE] += 100
    return values


def _gaps(n: int) -> torch.Tensor:
    """Every place that a sample would look at is small, and no other one is."""
    values = noise(n) + 10
    values[:: n // SAMPLE] = 0.01
    return values


@pytest.mark.checkered
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "make",
    [
        noise,
        _columns,
        _gaps,
        torch.zeros,
        torch.ones,
        lambda n: noise(n) * (noise(n, seed=1) > 2.5),  # mostly zeros
        lambda n: noise(n).masked_fill(noise(n, seed=2) > 1.5, math.nan),
        lambda n: noise(n).sort().values,
    ],
)
def test_among_many_values_wherever_the_large_ones_are_selection_is_that_sort(make, dtype):
    n = 3 * SAMPLE + 7
    values = make(n).to(dtype)
    size = values.double().abs()
    size[values.isinf()] = 1e301
    size[values.isnan()] = 1e302
    order = size.sort(descending=True, stable=True).indices
    for k in (1, 500, n // 100, n // 3, n - 1):
        assert torch.equal(largest(values, k), order[:k].sort().values)


def test_nans_of_other_payloads_are_one_kind_of_nan():
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32)
    assert largest(bits.view(torch.float32), 2).tolist() == [0, 1]


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 99))
def test_a_message_survives_its_bytes_which_are_as_many_as_it_says(n: int, k: int, seed: int):
    k = min(n, k)
    draw = torch.Generator().manual_seed(seed)
    indices = torch.randperm(n, generator=draw)[:k].sort().values
    message = CompressedGradient(indices.int(), torch.randn(k, generator=draw), n)
    packed = message.pack()
    assert packed.dtype == torch.uint8
    assert message.nbytes == packed.numel()
    again = CompressedGradient.unpack(packed, k, n, torch.float32)
    assert torch.equal(again.indices, message.indices)
    assert torch.equal(again.values, message.values)
    for code in CODES.values():
        encoded = code.encode(indices, n)
        assert len(encoded) == code.bits(n, k)
        assert torch.equal(code.decode(encoded, n, k), indices)


@pytest.mark.parametrize(
    ("n", "k", "code", "nbytes"),
    [
        (256, 1, "plain", 1),  # one of 256: a byte
        (65536, 1, "plain", 2),
        (1, 1, "plain", 0),  # there is no choice
        (1_000_000, 10_000, "two_parts", 10703),  # 8.6 bits; 4 bytes each would be 40,000
        (1_000_000, 1_000, "two_parts", 1495),  # 12 bits
        (1000, 900, "bitmap", 125),
    ],
)
def test_indices_take_the_shortest_code(n: int, k: int, code: str, nbytes: int):
    assert code_for(n, k) is CODES[code]
    assert encoded_size(n, k) == nbytes


BOUNDARIES = [1, 2, 255, 256, 257, 65535, 65536, 65537, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40]


@pytest.mark.parametrize("n", BOUNDARIES)
def test_indices_survive_at_the_ends_of_what_a_width_can_hold(n: int):
    spread = [i * n // 50 for i in range(50)]
    for wanted in ([0], [n - 1], [0, n - 1], [n // 2 - 1, n // 2], [*range(9), n - 1], spread):
        indices = torch.tensor(sorted({i for i in wanted if 0 <= i < n}), dtype=torch.int64)
        k = len(indices)
        for code in CODES.values():
            if code.bits(n, k) < 10**6:
                assert torch.equal(code.decode(code.encode(indices, n), n, k), indices)
        values = torch.ones(k)
        packed = CompressedGradient(indices, values, n).pack()
        again = CompressedGradient.unpack(packed, k, n, torch.float32)
        assert torch.equal(again.indices.long(), indices)
        assert again.indices.dtype == (torch.int32 if n <= 2**31 else torch.int64)


@pytest.mark.parametrize("ratio", [0, 5e-324, 1e-12, 0.5, 1])
@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf, 1e-45, -1e-40])
def test_values_that_are_all_alike_are_taken_from_the_first_on(ratio: float, value: float):
    for shape in [(6,), (2, 3), (), (0,)]:
        gradient = torch.full(shape, value)
        message = TopK(ratio).compress(gradient)
        k = min(gradient.numel(), max(1, math.ceil(gradient.numel() * ratio)))
        assert message.indices.tolist() == list(range(k))
        back = TopK(ratio).decompress(message)
        assert back.shape == gradient.shape
        torch.testing.assert_close(
            back.flatten()[:k], gradient.flatten()[:k], rtol=0, atol=0, equal_nan=True
        )
        assert not back.flatten()[k:].any()


def test_a_code_is_never_far_from_the_number_of_choices():
    for n in (100, 1000, 100_000):
        for k in (1, n // 100, n // 10, n // 2):
            choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
            bits = choices / math.log(2)
            assert code_for(n, k).bits(n, k) <= bits + 0.6 * k + 8


def test_bytes_that_are_no_message_are_refused():
    message = CompressedGradient(torch.tensor([3, 500]).int(), torch.ones(2), 1000)
    packed = message.pack()
    with pytest.raises(SizeMismatchError, match="bytes, not"):
        CompressedGradient.unpack(packed[:-1], 2, 1000, torch.float32)
    for code in ("two_parts", "plain", "bitmap"):
        n, k = {"two_parts": (1000, 100), "plain": (300, 1), "bitmap": (10, 9)}[code]
        assert code_for(n, k) is CODES[code]
        bad = torch.full((4 * k + encoded_size(n, k),), 255, dtype=torch.uint8)
        with pytest.raises(SizeMismatchError, match="which"):
            CompressedGradient.unpack(bad, k, n, torch.float32)


def test_lists_of_gradients_are_compressed_and_restored_by_shape():
    gradients = [torch.tensor([[1.0, 0], [0, 0]]), torch.tensor(3.0), torch.zeros(0, 4)]
    compressed = compress_gradients(gradients, 0.25)
    restored = decompress_gradients(compressed, [(2, 2), (), (0, 4)])
    for before, after in zip(gradients, restored, strict=True):
        assert torch.equal(before, after)


def test_an_index_out_of_range_is_an_error_that_names_it():
    for index in (4, -1, 2**31 - 1):
        bad = CompressedGradient(torch.tensor([index]), torch.ones(1), 4)
        with pytest.raises(IndexError, match=f"index {index} .* 4 values"):
            decompress_gradients([bad], [(2, 2)])


def test_an_index_that_comes_twice_is_an_error_that_names_it():
    bad = CompressedGradient(torch.tensor([2, 0, 2]), torch.ones(3), 4)
    for refuses in (bad.dense, bad.pack):
        with pytest.raises(ValueError, match="index 2 of a compressed gradient comes twice"):
            refuses()


def test_indices_in_another_order_are_read_but_not_packed():
    message = CompressedGradient(torch.tensor([3, 1]), torch.tensor([5.0, 6.0]), 4)
    assert message.dense().tolist() == [0, 6, 0, 5]
    with pytest.raises(ValueError, match="ascending order: sort them"):
        message.pack()
    with pytest.raises(IndexError, match="index 9 "):
        CompressedGradient(torch.tensor([9]), torch.ones(1), 4).pack()


def test_bytes_whose_indices_are_out_of_range_or_order_are_refused():
    n, k = 300, 2  # of 9 bits each
    assert code_for(n, k) is CODES["plain"]
    for indices in ([400, 7], [7, 400], [7, 7], [8, 7]):
        code = pack_bits(bits_of(torch.tensor(indices), 9))
        packed = torch.cat([torch.ones(k).view(torch.uint8), code])
        with pytest.raises(SizeMismatchError, match="which 2 of 300 values"):
            CompressedGradient.unpack(packed, k, n, torch.float32)


def test_what_is_no_list_of_gradients_or_of_messages_is_refused_by_number():
    with pytest.raises(TypeError, match="not one tensor"):
        compress_gradients(torch.ones(2, 2), 0.5)
    with pytest.raises(TypeError, match="gradient 1 is a NoneType"):
        compress_gradients([torch.ones(2), None], 0.5)
    with pytest.raises(TypeError, match="gradient 0 is a Tensor, not a CompressedGradient"):
        decompress_gradients([torch.ones(2)], [(2,)])
    assert len(compress_gradients((torch.ones(n) for n in range(3)), 0.5)) == 3


def test_shapes_that_do_not_fit_are_errors_that_name_both():
    compressed = compress_gradients([torch.ones(4)], 1)
    with pytest.raises(SizeMismatchError, match=r"gradient 0 had 4 values.*\[5\] has 5"):
        decompress_gradients(compressed, [(5,)])
    with pytest.raises(SizeMismatchError, match="1 gradients and 2 shapes"):
        decompress_gradients(compressed, [(4,), (4,)])
    uneven = CompressedGradient(torch.tensor([0, 1]), torch.ones(1), 4)
    with pytest.raises(SizeMismatchError, match="index for each value"):
        uneven.dense()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_dtypes_without_a_magnitude_to_sort_by_are_refused(dtype: torch.dtype):
    with pytest.raises(UnsupportedOperationError, match="TopK"):
        TopK(0.5).compress(torch.ones(4).to(dtype))


def test_compressing_changes_nothing_and_needs_no_contiguous_tensor():
    gradient = torch.randn(6, 8).t()[::2]
    before = gradient.clone()
    message = TopK(1).compress(gradient)
    assert torch.equal(gradient, before)
    assert torch.equal(message.dense(), gradient)
