"""The arithmetic of shards: every element is written once, and read from where it was written."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoint_runs import MEMORY
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from phalanx import chunk_ranges
from phalanx.checkpoint.manifest import StoredShard, from_json, to_json
from phalanx.checkpoint.save_plan import RankDescription, plan_files, tensor_records
from phalanx.checkpoint.tensor_files import TensorShard, lay_out, overlaps, write_tensors
from phalanx.parallel.wrapper import Slice

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def held_by(rank: int, ranks: int, sizes: list[int]) -> list[TensorShard]:
    parts = [chunk_ranges(size, ranks)[rank] for size in sizes]
    return [
        TensorShard("model", f"w{number}", "float32", (size,), start, stop, equal=True)
        for number, (size, (start, stop)) in enumerate(zip(sizes, parts, strict=True))
    ]


def description(held: list[TensorShard]) -> RankDescription:
    return RankDescription([], held, {}, {}, None, "", None)


@settings(max_examples=50)
@given(SIZES, st.integers(1, 8), st.integers(1, 3), st.integers(1, 8))
def test_every_element_is_read_from_where_it_was_written(
    sizes: list[int], shards: int, replicas: int, readers: int
) -> None:
    described = [
        description(held_by(rank % shards, shards, sizes)) for rank in range(shards * replicas)
    ]
    planned = plan_files(described)
    records = tensor_records(planned, "model")
    written = Counter[tuple[str, int]]()
    for file in planned:
        for shard, _ in file.shards:
            assert shard in described[file.rank].held
            written.update((shard.name, at) for at in range(shard.start, shard.stop))
    assert written == {(f"w{n}", at): 1 for n, size in enumerate(sizes) for at in range(size)}
    for number, size in enumerate(sizes):
        record = records[f"w{number}"]
        for start, stop in chunk_ranges(size, readers):
            reached = start
            for stored, begin, end in overlaps(record.pieces, start, stop):
                assert begin == reached
                assert stored.start <= begin < end <= stored.stop
                reached = end
            assert reached == stop


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8), st.data())
def test_shards_that_overlap_give_each_element_once(ends: list[tuple[int, int]], data: Any) -> None:
    shards = sorted((min(pair), max(pair)) for pair in ends)
    covered = set()
    for start, stop in shards:
        covered.update(range(start, stop))
    start = data.draw(st.integers(0, 30))
    stop = start
    while stop in covered:
        stop += 1
    found = overlaps([StoredShard(0, 0, *ends) for ends in shards], start, stop)
    assert [at for _, begin, end in found for at in range(begin, end)] == list(range(start, stop))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_what_all_ranks_hold_is_shared_out_evenly(sizes: list[int], ranks: int) -> None:
    held = [
        TensorShard("model", f"w{number}", "float32", (size,), 0, size, equal=True)
        for number, size in enumerate(sizes)
    ]
    load = [0] * ranks
    for file in plan_files([description(held)] * ranks):
        load[file.rank] += sum(shard.nbytes for shard, _ in file.shards)
    assert sum(load) == 4 * sum(sizes)
    assert max(load) - min(load) <= 4 * max(sizes)


@given(
    st.lists(st.sampled_from(["float64", "bool", "bfloat16", "int32", "complex128"]), max_size=9)
)
def test_tensors_in_a_file_lie_one_after_the_other_each_where_its_elements_may(
    dtypes: list[str],
) -> None:
    shards = [
        TensorShard("model", f"t{n}", dtype, (3, n), 0, 3 * n, equal=True)
        for n, dtype in enumerate(dtypes)
    ]
    file = lay_out(0, "model", "file", shards)
    length = int.from_bytes(file.header[:8], "little")
    assert len(file.header) == 8 + length
    assert len(file.header) % 8 == 0
    reached = len(file.header)
    for shard, at in file.shards:
        assert at == reached
        assert at % min(8, max(1, shard.nbytes // max(1, shard.stop))) == 0
        reached += shard.nbytes
    assert msgspec.json.decode(file.header[8:].rstrip())["__metadata__"]["format"] == "pt"
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        contents = {shard.name: bytes(shard.nbytes) for shard, _ in file.shards}
        record = write_tensors(folder, file, lambda shard: memoryview(contents[shard.name]))
        assert record.bytes == reached == Path(folder, "file").stat().st_size


@settings(max_examples=50)
@given(st.lists(st.integers(0, 60), max_size=6), st.integers(1, 50))
def test_the_checksums_are_of_the_blocks_of_the_file(sizes: list[int], block: int) -> None:
    """However long the tensors are in it."""
    shards = [
        TensorShard("model", f"t{n}", "uint8", (size,), 0, size, equal=True)
        for n, size in enumerate(sizes)
    ]
    draw = random.Random(0)
    contents = {shard.name: draw.randbytes(shard.stop) for shard in shards}
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        file = lay_out(0, "model", "file", shards)
        record = write_tensors(folder, file, lambda shard: memoryview(contents[shard.name]), block)
        written = Path(folder, "file").read_bytes()
    blocks = [written[at : at + block] for at in range(0, len(written), block)]
    assert record.checksums == "".join(map(xxh3_64_hexdigest, blocks))
    assert written == file.header + b"".join(contents[shard.name] for shard, _ in file.shards)


def test_a_tensor_is_asked_for_when_what_is_before_it_is_written() -> None:
    """So that copies of tensors on a GPU are in memory one at a time."""
    shards = [TensorShard("model", f"t{n}", "uint8", (9,), 0, 9, equal=True) for n in range(3)]
    file = lay_out(0, "model", "file", shards)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        written = []

        def bytes_of(shard: TensorShard) -> memoryview:
            written.append(Path(folder, "file").stat().st_size)
            return memoryview(bytes(shard.nbytes))

        write_tensors(folder, file, bytes_of)
    assert written == [at for _, at in file.shards]


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
