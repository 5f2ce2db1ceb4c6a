"""Where parameters lie in shards: the picture, and that nothing is lost or there twice."""

from __future__ import annotations

from math import prod

import pytest
import torch
from ddp_models import seeded
from ddp_runs import assert_same_bits, values
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    joined,
    on_ranks,
    value_pieces,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx import FSDP, ShardingStrategy
from phalanx.fsdp.flat_param import FlatLayout
from phalanx.parallel.wrapper import Slice

PICTURES = [
    ("w: 5, b: 2; over 3", [(5,), (2,)], 3, "| w w w | w w b | b . . |"),
    ("one rank has all", [(2, 3), (2,)], 1, "| w w w w w w b b |"),
    ("nothing has to divide", [(7,)], 4, "| w w | w w | w w | w . |"),
    ("fewer elements than ranks", [(1,), (1,)], 4, "| w | b | . | . |"),
    ("padding only, on the last ones", [(3,), (2,)], 4, "| w w | w b | b . | . . |"),
    ("a number is one element", [(), (3,)], 2, "| w b | b b |"),
    ("an empty parameter takes no place", [(0, 4), (3,)], 2, "| b b | b . |"),
    ("nothing at all", [(0,), (2, 0)], 3, "|"),
]


def picture(layout: FlatLayout, letters: str) -> str:
    """As its docstring draws it, with a letter for each parameter."""
    counts = [prod(shape) for shape in layout.shapes]
    cells = [letter for letter, n in zip(letters, counts, strict=True) for _ in range(n)]
    cells += ["."] * (layout.padded - layout.total)
    shards = range(0, layout.padded, layout.shard or 1)
    return "".join(f"| {' '.join(cells[i : i + layout.shard])} " for i in shards) + "|"


@pytest.mark.parametrize(
    ("shapes", "parts", "drawn"), [row[1:] for row in PICTURES], ids=[row[0] for row in PICTURES]
)
def test_the_picture_of_a_layout(shapes: list[tuple[int, ...]], parts: int, drawn: str):
    assert picture(FlatLayout(shapes, parts), "wb"[: len(shapes)]) == drawn


SHAPES = st.lists(
    st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 7]), max_size=3).map(tuple), min_size=1, max_size=6
)


@given(SHAPES, st.integers(1, 9))
def test_shards_tile_every_parameter_exactly_once(shapes: list[tuple[int, ...]], parts: int):
    layout = FlatLayout(shapes, parts)
    assert 0 <= layout.padded - layout.total < parts
    assert layout.shard * parts == layout.padded
    for number, shape in enumerate(shapes):
        end = 0
        for place in range(parts):
            start, stop = layout.part(number, place)
            inside = layout.inside(number, place)
            assert inside[1] - inside[0] == stop - start
            assert 0 <= inside[0] <= inside[1] <= layout.shard
            if start < stop:
                assert start == end
                assert place * layout.shard + inside[0] == layout.starts[number] + start
                end = stop
        assert end == torch.Size(shape).numel()


@given(SHAPES, st.integers(1, 9))
def test_the_picture_is_what_the_parts_say(shapes: list[tuple[int, ...]], parts: int):
    layout = FlatLayout(shapes, parts)
    letters = "abcdef"[: len(shapes)]
    shards = [["."] * layout.shard for _ in range(parts)]
    for number, letter in enumerate(letters):
        for place in range(parts):
            start, stop = layout.inside(number, place)
            shards[place][start:stop] = letter * (stop - start)
    drawn = "".join(f"| {' '.join(shard)} " for shard in shards) if layout.shard else ""
    assert picture(layout, letters) == drawn + "|"


class Tree(nn.Module):
    """Parameters of any shapes, at any depth."""

    def __init__(self, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
        super().__init__()
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            value = torch.randn(shape).mul(100).to(dtype)
            parameter = nn.Parameter(value, requires_grad=dtype.is_floating_point)
            if number % 2:
                self.register_parameter(f"p{number}", parameter)
            else:
                inner = Tree([], [])
                inner.register_parameter("value", parameter)
                self.add_module(f"m{number}", inner)

    def forward(self) -> None:
        """Nothing is computed."""


STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, ShardingStrategy.hybrid(1)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


@settings(max_examples=12)
@given(st.data(), SHAPES, st.integers(1, 5), st.sampled_from(STRATEGIES), st.booleans())
def test_any_parameters_come_out_as_they_went_in(
    data: st.DataObject,
    shapes: list[tuple[int, ...]],
    ranks: int,
    strategy: ShardingStrategy,
    messages: bool,
):
    dtypes = data.draw(
        st.lists(st.sampled_from(DTYPES), min_size=len(shapes), max_size=len(shapes))
    )
    cut = data.draw(st.lists(st.booleans(), min_size=1, max_size=3))

    def build() -> nn.Module:
        return seeded(lambda: Tree(shapes, dtypes))

    def body(model: nn.Module, backend):
        modules = {module: cut[number % len(cut)] for number, module in enumerate(model.modules())}
        some = any(wanted for module, wanted in modules.items())
        unit = modules.__getitem__ if some else None
        fsdp = FSDP(model, backend, strategy=strategy, unit=unit)
        pieces = value_pieces(fsdp)
        full = fsdp.full_state_dict()
        plain = fsdp.unwrap()
        assert plain is model
        return pieces, full, values(plain)

    wanted = values(build())
    found = on_ranks(MESSAGES if messages else COMMON, ranks, build, body)
    assert_same_bits([wanted, joined([pieces for pieces, _, _ in found])])
    for _, full, unwrapped in found:
        assert_same_bits([wanted, full, unwrapped])


def test_slices_say_what_each_rank_holds():
    def body(model: nn.Module, backend):
        fsdp = FSDP(model, backend)
        assert {name: where.numel for name, where in fsdp.slices().items()} == {
            name: p.numel() for name, p in fsdp.named_parameters()
        }
        return fsdp.slices()

    build = lambda: nn.Linear(3, 2)  # noqa: E731
    assert on_ranks(COOPERATIVE, 3, build, body) == [
        {"weight": Slice((2, 3), 0, 3), "bias": Slice((2,), 0, 0)},
        {"weight": Slice((2, 3), 3, 6), "bias": Slice((2,), 0, 0)},
        {"weight": Slice((2, 3), 6, 6), "bias": Slice((2,), 0, 2)},
    ]


def test_without_shards_every_rank_holds_the_whole_in_its_own_shape():
    def body(model: nn.Module, backend):
        fsdp = FSDP(model, backend, strategy=NO_SHARD)
        assert all(where.is_whole for where in fsdp.slices().values())
        return {name: tuple(p.shape) for name, p in fsdp.named_parameters()}

    assert (
        on_ranks(COOPERATIVE, 2, lambda: nn.Linear(3, 2), body)
        == [{"weight": (2, 3), "bias": (2,)}] * 2
    )
