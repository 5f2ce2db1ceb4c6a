"""What every compressor promises: shapes, dtypes, bytes, agreement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from members import average, buckets_of, noise

from phalanx import ErrorFeedback, PowerSGD, Quantized, TopK, UnsupportedOperationError
from phalanx.compression import Compressor, Half, RandomK

ALL: dict[str, Callable[[], Compressor]] = {
    "TopK": lambda: TopK(0.1),
    "RandomK": lambda: RandomK(0.1),
    "float16": lambda: Half(torch.float16),
    "bfloat16": lambda: Half(torch.bfloat16),
    "8 bits": lambda: Quantized(8),
    "4 bits": lambda: Quantized(4, block=32),
    "1 bit": lambda: Quantized(1, block=32),
    "PowerSGD": lambda: PowerSGD(1),
    "ErrorFeedback(TopK)": lambda: ErrorFeedback(TopK(0.1)),
    "ErrorFeedback(1 bit)": lambda: ErrorFeedback(Quantized(1)),
}
EXACT: dict[str, Callable[[], Compressor]] = {
    "TopK": lambda: TopK(1),
    "RandomK": lambda: RandomK(1),
    "PowerSGD": lambda: PowerSGD(9),
}
SHAPES = [(6, 5), (33,), (1, 1), (), (0,), (3, 0), (4, 3, 5)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_what_comes_back_has_the_shape_and_dtype_of_what_was_given(name: str, dtype: torch.dtype):
    for shape in SHAPES:
        given = noise(*shape).to(dtype)
        before = given.clone()
        compressor = ALL[name]()
        message = compressor.compress(given)
        back = compressor.decompress(message)
        assert back.shape == given.shape
        assert back.dtype == dtype
        assert torch.equal(given, before)
        assert back.data_ptr() != given.data_ptr() or back.numel() == 0
        assert isinstance(message.nbytes, int)


@pytest.mark.parametrize("name", EXACT)
def test_what_leaves_nothing_out_is_exact(name: str):
    for shape in SHAPES:
        compressor, given = EXACT[name](), noise(*shape)
        assert torch.equal(compressor.decompress(compressor.compress(given)), given)


@pytest.mark.parametrize(
    ("compressor", "nbytes"),
    [
        (TopK(0.01), 40 + 11),  # 10 of 1000: values, and 8.5 bits an index
        (RandomK(0.01), 40),  # no index
        (Half(), 2000),
        (Quantized(8), 1000 + 4 * 4),  # four blocks of 256
        (Quantized(4), 500 + 4 * 4),
        (Quantized(1), 125 + 4 * 4),
        (PowerSGD(2), 2 * (20 + 50) * 4),
        (PowerSGD(2, dtype=torch.bfloat16), 2 * (20 + 50) * 2),
        (ErrorFeedback(TopK(0.01)), 40 + 11),
    ],
)
def test_bytes_are_counted_exactly(compressor: Compressor, nbytes: int):
    assert compressor.compress(noise(20, 50)).nbytes == nbytes


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("name", ALL)
def test_every_member_has_the_same_bits_in_the_end(name: str, p: int):
    compressors = [ALL[name]() for _ in range(p)]
    for step in range(3):
        given = [
            [noise(*shape, seed=100 * step + 10 * member) for shape in SHAPES]
            for member in range(p)
        ]
        first, *others = average(compressors, buckets_of(given))
        assert first.isfinite().all()
        for other in others:
            assert torch.equal(first, other)
        for compressor in compressors:
            compressor.commit()


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*EXACT, "float16", "bfloat16", "8 bits"])
def test_averages_are_close_to_the_mean(name: str, p: int):
    make = EXACT.get(name) or ALL[name]
    given = [[noise(*shape, seed=10 * member) for shape in SHAPES] for member in range(p)]
    expected = sum(bucket.flat for bucket in buckets_of(given)) / p
    (found, *_) = average([make() for _ in range(p)], buckets_of(given))
    atol = {"float16": 4e-3, "bfloat16": 3e-2, "8 bits": 6e-2}.get(name, 1e-6)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ALL)
def test_nothing_to_average_is_no_round_at_all(name: str):
    average([ALL[name]() for _ in range(2)], buckets_of([[torch.zeros(0)], [torch.zeros(0)]]))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool])
def test_other_dtypes_are_refused(name: str, dtype: torch.dtype):
    with pytest.raises(UnsupportedOperationError, match="compresses float16"):
        ALL[name]().compress(torch.ones(4).to(dtype))


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_bits_again(name: str):
    def run() -> list[torch.Tensor]:
        compressors = [ALL[name]() for _ in range(2)]
        found = []
        for _ in range(3):
            found += average(compressors, buckets_of([[noise(50)], [noise(50, seed=1)]]))
        return found

    torch.manual_seed(1)
    first = run()
    torch.manual_seed(2)  # which they do not draw from
    state = torch.get_rng_state()
    for one, other in zip(first, run(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


def test_bad_options_are_refused():
    for bad in (
        lambda: Quantized(2),
        lambda: Quantized(8, block=0),
        lambda: PowerSGD(0),
        lambda: PowerSGD(1, dtype=torch.int8),
        lambda: Half(torch.float32),
        lambda: RandomK(2),
    ):
        with pytest.raises(ValueError):
            bad()
