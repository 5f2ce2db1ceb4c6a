"""Cutting a tensor over ranks, and joining it again: nothing lost, the earlier shards longer."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx import SizeMismatchError, gather_shards, shard_tensor
from phalanx.tensor.shards import ShardSpec


def test_the_earlier_shards_are_one_row_longer():
    shards = shard_tensor(torch.arange(7), 3)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [3, 4], [5, 6]]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)
def test_joining_the_shards_gives_exactly_the_tensor(
    shape: list[int], data: st.DataObject, dtype: torch.dtype
):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    n = data.draw(st.integers(1, shape[0]))
    shards = shard_tensor(t, n)
    sizes = [len(shard) for shard in shards]
    assert len(shards) == n
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    joined = gather_shards(shards)
    assert torch.equal(joined, t)
    assert joined.dtype is dtype


@pytest.mark.parametrize("n", [1, 4])
def test_a_tensor_of_no_dimensions_gives_itself(n: int):
    t = torch.tensor(3.0)
    assert shard_tensor(t, n) == [t]
    assert gather_shards(shard_tensor(t, n)) == t


@pytest.mark.parametrize("n", [1, 2])
def test_a_shard_owns_its_rows_alone_in_memory_and_in_a_file(n: int):
    t = torch.zeros(1000, 2)
    shards = shard_tensor(t, n)
    shards[-1].fill_(1)
    assert t.sum() == 0
    for shard in shards:
        assert shard.untyped_storage().nbytes() == shard.nbytes
    file = io.BytesIO()
    torch.save(shards[0], file)
    assert len(file.getvalue()) < shards[0].nbytes + 2000


def test_the_joined_tensor_is_a_new_one():
    t = torch.zeros(5, 2)
    assert gather_shards([t]).data_ptr() != t.data_ptr()
    alone = torch.tensor(3.0)
    assert shard_tensor(alone, 1)[0].data_ptr() != alone.data_ptr()


def test_gradients_go_through_cutting_and_joining():
    t = torch.ones(5, requires_grad=True)
    (gather_shards(shard_tensor(t, 2)) * torch.arange(5)).sum().backward()
    assert t.grad.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("n", [0, -1, 4])
def test_no_shards_or_more_than_there_are_rows_is_refused(n: int):
    with pytest.raises(ValueError, match=f"into {n} shards"):
        shard_tensor(torch.ones(3, 5), n)


def test_what_is_no_tensor_or_no_number_of_shards_is_a_type_error():
    with pytest.raises(TypeError, match="shard_tensor cuts a tensor, not list"):
        shard_tensor([1, 2], 2)
    with pytest.raises(TypeError, match=r"n is a whole number, not 1\.5"):
        shard_tensor(torch.ones(3), 1.5)


def test_an_empty_tensor_cannot_be_cut():
    with pytest.raises(ValueError, match="0 rows"):
        shard_tensor(torch.ones(0, 5), 1)


@pytest.mark.parametrize(
    "odd",
    [torch.ones(2, 4), torch.ones(2), torch.ones(2, 3, 1), torch.tensor(1.0), torch.ones(2, 3) > 0],
)
def test_shards_that_do_not_fit_together_are_named(odd: torch.Tensor):
    with pytest.raises(SizeMismatchError, match=r"shard 2 of shape"):
        gather_shards([torch.ones(2, 3), torch.ones(2, 3), odd])


def test_no_shards_cannot_be_joined():
    with pytest.raises(ValueError, match="no shards"):
        gather_shards([])
    with pytest.raises(SizeMismatchError):
        gather_shards([torch.tensor(1.0), torch.tensor(2.0)])


PICTURES = {
    (10, 4, None, 1): "0 1 2 | 3 4 5 | 6 7 | 8 9",
    (12, 3, (6, 6), 1): "0 1 6 7 | 2 3 8 9 | 4 5 10 11",
    (12, 2, None, 4): "0 1 2 3 4 5 6 7 | 8 9 10 11",
    (14, 2, (6, 4, 4), 2): "0 1 2 3 6 7 10 11 | 4 5 8 9 12 13",
    (2, 3, None, 1): "0 | 1 | ",
}


@pytest.mark.parametrize("case", PICTURES)
def test_a_cut_looks_like_its_picture(case: tuple[int, int, tuple[int, ...] | None, int]):
    total, ranks, parts, unit = case
    cut = ShardSpec.of(total, ranks, parts=parts, unit=unit)
    shards = cut.shards(torch.arange(total), 0)
    assert " | ".join(" ".join(map(str, shard.tolist())) for shard in shards) == PICTURES[case]


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_every_cut_is_undone_by_joining(ranks: int, unit: int, units: list[int], dim: int):
    parts = [unit * count for count in units]
    cut = ShardSpec.of(sum(parts), ranks, parts=parts, unit=unit)
    shape = [2, 3, 4]
    shape[dim] = sum(parts)
    whole = torch.arange(2 * 3 * 4 * sum(parts) // [2, 3, 4][dim]).view(shape)
    shards = cut.shards(whole, dim)
    assert [shard.shape[dim] for shard in shards] == cut.sizes()
    assert torch.equal(cut.join(shards, dim), whole)
