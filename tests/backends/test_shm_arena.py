"""The arena: blocks that never overlap, are used again, and live as long as what lies in them."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.transport.shm.segments import KEPT, LINE, PAGE, SMALLEST, Arena, Block, Segment

FIRST = 1 << 20
USED = 8 * PAGE
KIB, MIB = 1 << 10, 1 << 20


Maker = Callable[..., Arena]


@pytest.fixture
def an_arena() -> Iterator[Maker]:
    """Makes arenas, which are closed at the end."""
    with ExitStack() as stack:

        def make(
            publish: Callable[[int, Segment], None] = lambda number, segment: None,
            *,
            kept: int = KEPT,
        ) -> Arena:
            arena = Arena(Segment.create(FIRST), USED, publish, kept=kept)
            stack.callback(arena.close)
            return arena

        yield make


def resident(segment: Segment) -> int:
    """Bytes of memory that the system holds for it."""
    return os.fstat(segment.fd).st_blocks * 512


def all_is_one_block_again(arena: Arena) -> bool:
    """Whether nothing is taken, and every segment can be had in one piece."""
    wholes = [arena.take(FIRST - USED)]
    wholes += [arena.take(segment.size, after=0) for segment in arena.segments[1:]]
    return wholes == [
        Block(0, USED, FIRST - USED),
        *(Block(n, 0, segment.size) for n, segment in enumerate(arena.segments) if n),
    ]


sizes = st.one_of(st.integers(0, 300), st.integers(0, 40 * KIB), st.just(3 * MIB))
steps = st.lists(st.tuples(sizes, st.booleans(), st.integers(0, 7)), max_size=60)


@settings(max_examples=examples(60))
@given(steps)
def test_live_blocks_are_aligned_and_never_overlap_and_all_comes_back(
    steps: list[tuple[int, bool, int]],
) -> None:
    arena = Arena(Segment.create(FIRST), USED, lambda number, segment: None)
    live: list[Block] = []
    for size, later, lucky in steps:
        if lucky and live:
            arena.give_back(live.pop(lucky % len(live)))
        block = arena.take(size, after=0 if later else -1)
        assert block.size >= max(size, 1)
        assert block.offset % (PAGE if size >= PAGE else LINE) == 0
        assert block.segment > 0 or (block.offset >= USED and not later)
        assert block.offset + block.size <= arena.segments[block.segment].size
        for other in live:
            assert (
                other.segment != block.segment
                or other.offset + other.size <= block.offset
                or block.offset + block.size <= other.offset
            )
        live.append(block)
    for block in live:
        arena.give_back(block)
    whole = all_is_one_block_again(arena)
    arena.close()
    assert whole


VIEWS: dict[str, Callable[[Tensor], object]] = {
    "a slice": lambda x: x[10:20],
    "another shape": lambda x: x.view(10, 100).t(),
    "another dtype": lambda x: x.view(torch.int32),
    "detached": lambda x: x.detach(),
    "a numpy array": lambda x: x.numpy(),
    "a tensor of a numpy array": lambda x: torch.from_numpy(x.numpy())[5:],
    "its bytes": lambda x: memoryview(x.numpy()),
    "its storage": lambda x: x.untyped_storage(),
    "what autograd has kept": lambda x: (x.requires_grad_() ** 2).sum(),
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_memory_lives_as_long_as_any_view_of_it_and_not_longer(
    view: Callable[[Tensor], object], an_arena: Maker
) -> None:
    arena = an_arena()
    tensor = arena.empty((1000,), torch.float32)
    tensor.fill_(7)
    address = tensor.data_ptr()
    kept = view(tensor)
    del tensor
    others = [arena.empty((1000,), torch.float32).fill_(8) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    del others
    del kept
    assert arena.empty((1000,), torch.float32).data_ptr() == address


def test_a_tensor_has_the_shape_and_dtype_that_were_asked_for(an_arena: Maker) -> None:
    arena = an_arena()
    for shape in ((), (0,), (3, 0), (1,), (2, 3), (5, 1, 4)):
        for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.complex128):
            tensor = arena.empty(shape, dtype)
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % LINE == 0
            if tensor.numel():
                # Never in the first: that has to have room for control blocks, to the end of the
                # process.
                assert 0 <= tensor.data_ptr() - arena.segments[1].start < arena.segments[1].size


def test_free_memory_beyond_what_is_kept_goes_back_to_the_system(an_arena: Maker) -> None:
    arena = an_arena(kept=4 * MIB)
    tensors = [arena.empty((2 * MIB,), torch.uint8).fill_(1) for _ in range(10)]
    segment = arena.segments[1]
    assert resident(segment) >= 20 * MIB
    kept = tensors.pop(4)
    tensors.clear()
    arena.take(1)
    assert resident(segment) <= 2 * MIB + 4 * MIB + 2 * MIB  # live, kept, and the last over that
    assert kept.sum() == 2 * MIB
    again = [arena.empty((2 * MIB,), torch.uint8).fill_(1) for _ in range(9)]
    assert len(arena.segments) == 2
    assert all(tensor.sum() == 2 * MIB for tensor in [*again, kept])


def test_memory_that_was_given_back_is_not_made_anew(an_arena: Maker) -> None:
    arena = an_arena()
    for _ in range(100):
        arena.empty((1 * MIB,), torch.uint8).fill_(1)
    assert resident(arena.segments[1]) <= 2 * MIB


def test_it_grows_by_segments_which_are_published_before_they_are_used(an_arena: Maker) -> None:
    published: list[tuple[int, int]] = []

    def publish(number: int, segment: Segment) -> None:
        assert number == len(arena.segments)
        published.append((number, segment.size))

    arena = an_arena(publish)
    arena.empty((1,), torch.uint8)
    kept = arena.take(SMALLEST + 1)
    assert published == [(1, SMALLEST), (2, 2 * SMALLEST)]
    assert kept.segment == 2
    assert arena.take(10 * KIB).segment == 0  # small holes are filled first


def files_of_memory() -> set[str]:
    """Numbers of this process's open files that are shared memory of ours."""
    links = {
        file.name: os.readlink(file)
        for file in Path("/proc/self/fd").iterdir()
        if file.is_symlink()
    }
    return {number for number, link in links.items() if "phalanx" in link}


def refuse(number: int, segment: Segment) -> None:
    raise MemoryError("the table is full")


def test_a_segment_that_cannot_be_published_leaves_nothing_behind(an_arena: Maker) -> None:
    arena = an_arena(refuse)
    gc.collect()  # what other tests have left, or it would end meanwhile
    before = files_of_memory()
    for _ in range(3):
        with pytest.raises(MemoryError, match="full"):
            arena.empty((1,), torch.uint8)
    assert files_of_memory() <= before
    assert len(arena.segments) == 1
    assert arena.take(100).segment == 0


def test_tensors_outlive_a_closed_arena(an_arena: Maker) -> None:
    arena = an_arena()
    tensor = arena.empty((1000,), torch.int64)
    files = [segment.fd for segment in arena.segments]
    arena.close()
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)
    del arena
    gc.collect()
    assert tensor.copy_(torch.arange(1000)).sum() == 499500


def test_tensors_may_end_in_any_thread_and_whenever_garbage_is_collected(an_arena: Maker) -> None:
    arena = an_arena()
    lock = threading.Lock()  # the engine's, in life
    wrong: list[str] = []

    def use(number: int) -> None:
        for turn in range(100):
            with lock:
                tensor = arena.empty((1 + turn * 37 % 5000,), torch.int32)
            cycle: list[object] = [tensor.fill_(number)]
            cycle.append(cycle)  # freed by the collector, in whichever thread that runs
            if not bool((tensor == number).all()):
                wrong.append(f"thread {number}, turn {turn}")

    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert not wrong
    assert all_is_one_block_again(arena)


def test_no_python_code_runs_when_memory_is_given_back(an_arena: Maker) -> None:
    """A signal's handler that ran in it could raise to nobody: Python would drop the error."""
    arena, ran = an_arena(), []
    tensor = arena.empty((1000,), torch.float32)
    view = tensor[10:]
    del tensor
    sys.setprofile(lambda frame, event, argument: ran.append(event))
    del view
    sys.setprofile(None)
    assert [event for event in ran if event == "call"] == []
    arena.take(1)
    assert arena.empty((1000,), torch.float32).data_ptr() == arena.segments[1].start


def test_an_interrupt_in_any_line_of_empty_leaves_an_arena_that_works(an_arena: Maker) -> None:
    """A signal's handler may raise there: what was half made may be lost, and nothing else."""
    arena, lines, reached = an_arena(), 0, 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal reached
        if frame.f_code is not Arena.empty.__code__:
            return None
        reached += event == "line"
        if event == "line" and reached == lines:
            raise KeyboardInterrupt
        return trace

    while reached >= lines:
        lines, reached = lines + 1, 0
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            arena.empty((100,), torch.float32)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert arena.empty((100,), torch.float32).fill_(1.0).sum() == 100
    assert lines > 5
