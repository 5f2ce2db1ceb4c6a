"""`TorchBackend` and its named forms: process groups of torch's under a backend."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import Gloo, loopback_listener
from library_groups import dist, gloo, on_ranks, process_group

import phalanx
from phalanx import (
    Backend,
    BackendUnavailableError,
    CollectiveTimeoutError,
    GlooBackend,
    InvalidRankError,
    InvalidWorldSizeError,
    MisuseError,
    NcclBackend,
    ReduceOp,
    TorchBackend,
    UccBackend,
    UnsupportedOperationError,
)
from phalanx.core.steps import NativeCall

GROUPS = {"a process group": process_group, "a backend without one": gloo}


@pytest.fixture(params=GROUPS.values(), ids=GROUPS.keys())
def make_group(request: pytest.FixtureRequest) -> Callable[[Any, int, int], Any]:
    made: Callable[[Any, int, int], Any] = request.param
    return made


def test_any_process_group_will_do_and_is_as_it_was_afterwards(
    make_group: Callable[[Any, int, int], Any],
) -> None:
    store = dist.HashStore()

    def run(rank: int) -> None:
        group = make_group(store, rank, 3)
        with TorchBackend(group, timeout=20) as backend:
            assert (backend.rank, backend.world_size) == (rank, 3)
            assert backend.topology == (0, 0, 0)
            assert phalanx.all_reduce(torch.ones(2), backend).tolist() == [3.0, 3.0]
            assert phalanx.all_gather_object(rank, backend) == [0, 1, 2]
            backend.sendrecv(
                bytes([rank]), (rank + 1) % 3, into := bytearray(1), (rank - 1) % 3, tag=5
            )
            assert into[0] == (rank - 1) % 3
            if rank:
                pair = backend.subgroup([1, 2])
                assert phalanx.all_reduce(torch.ones(2), pair).tolist() == [2.0, 2.0]
        values = torch.ones(1)
        group.allreduce([values]).wait()
        assert values.item() == 3

    on_ranks(3, run)


def test_two_backends_over_one_group_do_not_mix(
    make_group: Callable[[Any, int, int], Any],
) -> None:
    store = dist.HashStore()

    def run(rank: int) -> None:
        group = make_group(store, rank, 2)
        other = 1 - rank
        with TorchBackend(group, timeout=20) as one, TorchBackend(group, timeout=20) as two:
            pending = phalanx.irecv(into := bytearray(1), one, other)
            two.sendrecv(b"2", other, second := bytearray(1), other)
            one.send(b"1", other)
            pending.wait()
            assert (into, second) == (b"1", b"2")

    on_ranks(2, run)


def test_the_users_own_messages_in_the_group_pass_by(
    make_group: Callable[[Any, int, int], Any],
) -> None:
    store = dist.HashStore()

    def run(rank: int) -> None:
        group = make_group(store, rank, 2)
        with TorchBackend(group, timeout=20) as backend:
            values = torch.full((3,), float(rank))
            work = group.send([values], 1, 0) if rank == 0 else group.recv([values], 0, 0)
            backend.sendrecv(b"x", 1 - rank, into := bytearray(1), 1 - rank)
            backend.barrier()
            work.wait()
            assert (values.tolist(), into) == ([0.0] * 3, b"x")

    on_ranks(2, run)


def test_a_rank_that_makes_no_backend_is_waited_for_as_long_as_the_timeout() -> None:
    store, gave_up = dist.HashStore(), threading.Event()

    def run(rank: int) -> None:
        group = process_group(store, rank, 2)
        if rank == 0:
            with pytest.raises(
                CollectiveTimeoutError, match=r"rank 0 waited 0.3 s .*for rank 1 of 2"
            ):
                TorchBackend(group, timeout=0.3)
            gave_up.set()
        assert gave_up.wait(10)

    on_ranks(2, run)


def test_without_a_group_it_is_that_of_init_process_group() -> None:
    with pytest.raises(MisuseError, match=r"init_process_group\(\), which was not called"):
        TorchBackend()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with TorchBackend() as backend:
            assert (backend.rank, backend.world_size) == (0, 1)
            assert phalanx.all_reduce(torch.ones(1), backend).item() == 1
        with pytest.raises(MisuseError, match="not a member"):
            TorchBackend(dist.GroupMember.NON_GROUP_MEMBER)
    finally:
        dist.destroy_process_group()


def test_only_members_of_a_job_form_a_group() -> None:
    """Two jobs, or a job and its earlier start, that come to one store."""
    listener = loopback_listener()
    store_at = f"127.0.0.1:{listener.getsockname()[1]}"
    gave_up = threading.Event()

    def run(rank: int) -> None:
        if rank == 0:
            with pytest.raises(
                CollectiveTimeoutError, match=r"rank 0 waited 0.5 s .* rank 1 of 2: did it start"
            ):
                GlooBackend(0, 2, store_at, timeout=0.5, job="one", listener=listener)
            assert gave_up.wait(20)
        else:
            with pytest.raises(CollectiveTimeoutError, match="for rank 0 of 2: did it start"):
                GlooBackend(1, 2, store_at, timeout=0.3, job="two")
            gave_up.set()

    on_ranks(2, run)


def test_arguments_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidWorldSizeError):
        GlooBackend(0, 0, "127.0.0.1:1")
    with pytest.raises(InvalidRankError):
        GlooBackend(2, 2, "127.0.0.1:1")
    with pytest.raises(ValueError, match="timeout"):
        GlooBackend(0, 2, "127.0.0.1:1", timeout=0)


def test_a_port_that_is_in_use_is_an_error_that_says_so() -> None:
    with loopback_listener() as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BackendUnavailableError, match="the port is in use"):
            GlooBackend(0, 2, address, timeout=1)


@pytest.mark.parametrize(("kind", "words"), [(NcclBackend, "CUDA"), (UccBackend, "USE_UCC=1")])
def test_what_this_build_of_torch_lacks_says_what_to_install(
    kind: type[NcclBackend | UccBackend], words: str
) -> None:
    if getattr(dist, f"is_{kind.kind}_available")():
        pytest.skip("this build of torch has it")
    with pytest.raises(BackendUnavailableError, match=f"no {kind.kind.upper()}: .*{words}"):
        kind(0, 2, "127.0.0.1:1")
    with loopback_listener() as listener:
        with pytest.raises(BackendUnavailableError):
            kind(0, 2, "127.0.0.1:1", listener=listener)
        assert listener.fileno() == -1, "it is closed, as by the backends that use it"


# ----------------------------------------------------------------- what the library has, and not


def test_collectives_of_the_library_and_those_by_messages_are_right_either_way() -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.int64, torch.uint8]

    def run(backend: Backend) -> None:
        for op in ReduceOp:
            for dtype in dtypes:
                if dtype.is_floating_point and op.value.startswith("b"):
                    continue
                all_values = [torch.tensor([1, 5, r + 2]).to(dtype) for r in range(3)]
                results = [
                    phalanx.all_reduce(all_values[backend.rank], backend, op, algorithm=algorithm)
                    for algorithm in ("auto", "direct")
                ]
                assert torch.equal(*results), (op, dtype)

    Gloo().run(run, 3)


NAN = float("nan")


def test_where_the_library_would_be_wrong_it_is_not_asked() -> None:
    """Gloo's minimum of NaN and a number is either, and its sum of float16 overflows."""

    def run(backend: Backend) -> None:
        mine = torch.tensor([NAN, 1.0] if backend.rank else [1.0, NAN])
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            assert phalanx.all_reduce(mine, backend, op).isnan().all()
        large = torch.full((3,), 60000.0, dtype=torch.float16)
        assert phalanx.all_reduce(large, backend, ReduceOp.MEAN).tolist() == large.tolist()

    Gloo().run(run, 2)


def test_the_table_says_what_is_the_librarys() -> None:
    def run(backend: Backend) -> None:
        native = backend.native
        assert native is not None
        ones, half, short = torch.ones(4), torch.ones(4).half(), torch.ones(4).short()
        for name in ("broadcast", "all_gather", "gather", "scatter", "all_to_all"):
            assert native.steps(NativeCall(name, short, short))
        for name in ("all_reduce", "reduce", "reduce_scatter"):
            assert native.steps(NativeCall(name, ones, ones, ReduceOp.SUM))
            assert native.steps(NativeCall(name, ones, ones, ReduceOp.MEAN))
            assert not native.steps(NativeCall(name, ones, ones, ReduceOp.MIN))
            assert not native.steps(NativeCall(name, half, half, ReduceOp.MEAN))
            assert not native.steps(NativeCall(name, short, short, ReduceOp.SUM))
        inner = backend.subgroup(range(2))
        assert inner.native is not None
        assert inner.native.steps(NativeCall("all_reduce", ones, ones, ReduceOp.SUM))
        alone = backend.subgroup([backend.rank])
        assert alone.native is None

    Gloo().run(run, 2)


def test_every_collective_of_the_library_gives_what_the_schedules_give() -> None:
    p = 3

    def run(backend: Backend) -> None:
        rank = backend.rank
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.bool):
            for shape in ((p,), (2 * p, 5)):
                everyone = [
                    (torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 + r).to(dtype)
                    for r in range(p)
                ]
                mine = everyone[rank].clone()
                joined = torch.cat(everyone)
                slices = [whole.chunk(p)[rank] for whole in everyone]
                assert torch.equal(phalanx.all_gather(mine, backend), joined)
                assert torch.equal(phalanx.all_to_all(mine, backend), torch.cat(slices))
                for root in range(p):
                    assert torch.equal(phalanx.broadcast(mine, backend, root), everyone[root])
                    gathered = phalanx.gather(mine, backend, root)
                    assert gathered is None or torch.equal(gathered, joined)
                    assert (gathered is None) == (rank != root)
                    own = phalanx.scatter(mine, backend, root)
                    assert torch.equal(own, everyone[root].chunk(p)[rank])
                if dtype in (torch.float32, torch.int64):
                    total = torch.stack(everyone).sum(0)
                    assert torch.equal(phalanx.all_reduce(mine, backend), total)
                    assert torch.equal(phalanx.reduce_scatter(mine, backend), total.chunk(p)[rank])
                    for root in range(p):
                        reduced = phalanx.reduce(mine, backend, root)
                        assert reduced is None or torch.equal(reduced, total)
                        assert (reduced is None) == (rank != root)
                assert torch.equal(mine, everyone[rank]), "what is given is not changed"

    Gloo().run(run, p)


def test_results_go_in_place_and_into_memory_of_the_callers_however_it_lies() -> None:
    def run(backend: Backend) -> None:
        flat = torch.arange(6.0)
        assert phalanx.all_reduce_(flat, backend) is flat
        assert flat.tolist() == [0, 2, 4, 6, 8, 10]
        strided = torch.arange(6.0).reshape(2, 3).t()
        assert phalanx.all_reduce_(strided, backend) is strided
        assert strided.t().flatten().tolist() == [0, 2, 4, 6, 8, 10]
        into = torch.empty(4, 3)
        phalanx.all_gather(torch.full((2, 3), float(backend.rank)), backend, into=into)
        assert into[:, 0].tolist() == [0, 0, 1, 1]
        half = into[2 * backend.rank : 2 * backend.rank + 2]
        phalanx.all_gather(half, backend, into=into)  # in place, as its part
        assert into[:, 0].tolist() == [0, 0, 1, 1]
        if backend.rank == 0:
            phalanx.broadcast_(torch.full((2,), 7.0), backend)
        else:
            into = torch.zeros(2, 2).t()[0]
            assert phalanx.broadcast_(into, backend).tolist() == [7.0, 7.0]
        empty = torch.empty(0, 3)
        assert phalanx.all_reduce(empty, backend).shape == (0, 3)
        assert phalanx.all_reduce(torch.tensor(2.0), backend).item() == 4

    Gloo().run(run, 2)


def test_with_strict_everything_is_compared_and_so_goes_by_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHALANX_STRICT", "1")

    def run(backend: Backend) -> None:
        assert backend.native is None
        with pytest.raises(phalanx.DesyncError, match=r"all_reduce #0.*\n.*all_reduce #0"):
            phalanx.all_reduce(torch.ones(2 + backend.rank), backend)

    Gloo().run(run, 2)


# --------------------------------------------------------------------------------------- failures


def test_a_rank_that_dies_in_a_collective_of_the_librarys_is_named_by_all() -> None:
    def run(backend: Backend) -> None:
        phalanx.all_reduce(torch.ones(1000), backend)
        if backend.rank == 1:
            for other in (0, 2, 3):
                backend.recv(bytearray(1), other)
            backend.abort()
            return
        pending = phalanx.async_all_reduce(torch.ones(1000), backend)
        backend.send(b"!", 1)
        with pytest.raises(
            phalanx.PeerLostError, match=r"rank 1 was lost: its connection ended"
        ) as info:
            pending.wait()
        assert (info.value.peer, info.value.op, info.value.sequence) == (1, "all_reduce", 1)
        with pytest.raises(phalanx.PeerLostError, match=r"the group is broken: .*rank 1 was lost"):
            phalanx.all_reduce(torch.ones(1000), backend)

    Gloo().run(run, 4)


def test_what_a_given_up_collective_would_have_written_stays_as_it_is() -> None:
    """After the timeout the library lets go of the memory, even if the missing rank comes."""
    gave_up = threading.Event()

    def run(backend: Backend) -> None:
        inner = backend.subgroup([0, 1])
        phalanx.all_reduce(torch.ones(1), inner)
        values = torch.ones(1000)
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"rank 1.* has made no matching call"):
                phalanx.all_reduce_(values, inner, timeout=0.3)
            gave_up.set()
            values.fill_(5.0)
        else:
            assert gave_up.wait(20)
            with pytest.raises(CollectiveTimeoutError, match=r"waited 0.3 s"):
                phalanx.all_reduce_(values, inner)
        backend.barrier()  # the other groups go on
        assert phalanx.all_reduce(torch.ones(1), backend).item() == 2
        assert values.unique().tolist() == [5.0 if backend.rank == 0 else 1.0]

    Gloo().run(run, 2)


def test_the_librarys_words_are_in_the_error_where_nobody_says_more() -> None:
    """Who is to blame is not known if the connections for messages are well."""
    broken = threading.Barrier(2)

    def run(backend: Backend) -> str:
        phalanx.all_reduce(torch.ones(2), backend)
        if backend.rank == 1:
            backend._natives.world.abort()  # type: ignore[attr-defined]
        broken.wait(20)
        with pytest.raises(phalanx.PeerLostError) as info:
            phalanx.all_reduce(torch.ones(2), backend)
        assert (info.value.op, info.value.sequence) == ("all_reduce", 1)
        return str(info.value)

    texts = Gloo().run(run, 2)
    assert any("Gloo says: " in text for text in texts)
    assert all(re.search(r"rank \d: all_reduce #1 \(float32 \[2\]", text) for text in texts)


def test_tensors_of_a_device_that_the_library_does_not_take_are_refused() -> None:
    def run(backend: Backend) -> None:
        assert backend.devices == {"cpu"}
        with pytest.raises(UnsupportedOperationError, match=r"moves dense CPU tensors.*meta"):
            phalanx.all_reduce(torch.ones(2, device="meta"), backend)
        assert phalanx.all_reduce(torch.ones(2), backend).tolist() == [2.0, 2.0]

    Gloo().run(run, 2)
