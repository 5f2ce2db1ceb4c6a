"""The arithmetic of parts: every element is written once, and read from where it was written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import chunk_ranges
from phalanx.checkpoint.fit import stretches
from phalanx.checkpoint.manifest import Piece, from_json, to_json
from phalanx.checkpoint.plan import Description, Held, plan_files, records_of
from phalanx.checkpoint.safetensors_file import Checksums, Content, lay_out
from phalanx.parallel.wrapper import Slice

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def held_by(rank: int, ranks: int, sizes: list[int]) -> list[Held]:
    parts = [chunk_ranges(size, ranks)[rank] for size in sizes]
    return [
        Held("model", f"w{number}", "float32", (size,), start, stop, equal=True)
        for number, (size, (start, stop)) in enumerate(zip(sizes, parts, strict=True))
    ]


def description(held: list[Held]) -> Description:
    return Description([], held, {}, {}, None, "", None)


@settings(max_examples=50)
@given(SIZES, st.integers(1, 8), st.integers(1, 3), st.integers(1, 8))
def test_every_element_is_read_from_where_it_was_written(
    sizes: list[int], shards: int, replicas: int, readers: int
) -> None:
    described = [
        description(held_by(rank % shards, shards, sizes)) for rank in range(shards * replicas)
    ]
    planned = plan_files(described)
    records = records_of(planned)["model"]
    written = Counter[tuple[str, int]]()
    for rank, _, layout in planned:
        for content, _ in layout.contents:
            holds = {(held.name, held.start, held.stop) for held in described[rank].held}
            assert (content.name, content.start, content.stop) in holds
            written.update((content.name, at) for at in range(content.start, content.stop))
    assert written == {(f"w{n}", at): 1 for n, size in enumerate(sizes) for at in range(size)}
    for number, size in enumerate(sizes):
        record = records[f"w{number}"]
        for start, stop in chunk_ranges(size, readers):
            reached = start
            for piece, begin, end in stretches(record.pieces, start, stop):
                assert begin == reached
                assert piece.start <= begin < end <= piece.stop
                reached = end
            assert reached == stop


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8), st.data())
def test_stretches_of_pieces_that_overlap_give_each_element_once(
    ends: list[tuple[int, int]], data: Any
) -> None:
    pieces = sorted((min(pair), max(pair)) for pair in ends)
    covered = set()
    for start, stop in pieces:
        covered.update(range(start, stop))
    start = data.draw(st.integers(0, 30))
    stop = start
    while stop in covered:
        stop += 1
    found = stretches([Piece(0, 0, *ends) for ends in pieces], start, stop)
    assert [at for _, begin, end in found for at in range(begin, end)] == list(range(start, stop))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_what_all_ranks_hold_is_shared_out_evenly(sizes: list[int], ranks: int) -> None:
    held = [
        Held("model", f"w{number}", "float32", (size,), 0, size, equal=True)
        for number, size in enumerate(sizes)
    ]
    load = [0] * ranks
    for rank, _, layout in plan_files([description(held)] * ranks):
        load[rank] += sum(content.nbytes for content, _ in layout.contents)
    assert sum(load) == 4 * sum(sizes)
    assert max(load) - min(load) <= 4 * max(sizes)


@given(
    st.lists(st.sampled_from(["float64", "bool", "bfloat16", "int32", "complex128"]), max_size=9)
)
def test_tensors_in_a_file_lie_one_after_the_other_each_where_its_elements_may(
    dtypes: list[str],
) -> None:
    contents = [Content(f"t{n}", dtype, (3, n), 0, 3 * n) for n, dtype in enumerate(dtypes)]
    layout = lay_out("file", contents)
    length = int.from_bytes(layout.header[:8], "little")
    assert len(layout.header) == 8 + length
    assert len(layout.header) % 8 == 0
    reached = len(layout.header)
    for content, at in layout.contents:
        assert at == reached
        assert at % min(8, max(1, content.nbytes // max(1, content.stop))) == 0
        reached += content.nbytes
    assert layout.bytes == reached
    assert msgspec.json.decode(layout.header[8:].rstrip())["__metadata__"]["format"] == "pt"


@given(st.binary(max_size=200), st.integers(1, 50), st.lists(st.integers(1, 30)))
def test_checksums_do_not_depend_on_how_the_bytes_come(
    content: bytes, block: int, lengths: list[int]
) -> None:
    at_once, in_parts = Checksums(block), Checksums(block)
    at_once.add(memoryview(content))
    rest = memoryview(content)
    for length in lengths:
        in_parts.add(rest[:length])
        rest = rest[length:]
    in_parts.add(rest)
    assert at_once.finish() == in_parts.finish()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=9),
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.lists(inside, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inside, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(VALUES)
def test_values_survive_json_with_their_types(value: object) -> None:
    encoded = msgspec.json.encode(to_json(value, "value", lambda tensor, path: path))
    back = from_json(msgspec.json.decode(encoded), pytest.fail)
    assert back == value
    assert repr(back) == repr(value)


def test_a_slice_is_of_a_shape_read_row_by_row() -> None:
    assert Slice.whole((3, 4)) == Slice((3, 4), 0, 12)
    assert Slice.whole(()).numel == 1
    assert Slice((0, 4), 0, 0).is_whole
    assert not Slice((3, 4), 0, 0).is_whole
