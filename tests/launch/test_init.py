from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import NoReturn

import pytest
import torch.distributed as dist

from phalanx.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    InvalidWorldSizeError,
)
from phalanx.launch.environment import World
from phalanx.launch.init import init, rendezvous
from phalanx.launch.spawn import spawn
from phalanx.launch.store import StoreServer

TOKEN = "a token of many letters"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER_VARIABLES, "PHALANX_TOKEN", "PHALANX_TOKEN_FILE", "PHALANX_TRUST_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def world(no_launcher: None) -> Iterator[World]:
    """Rank 0 of two, with torchrun's store in this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield World(0, 2, 0, 2, "127.0.0.1", store.port, 0, True, "torchrun", "job")
    del store


@pytest.fixture
def behind_a_door(monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> Iterator[World]:
    """The same with the store of `phalanx run`, and the token that it gives its ranks."""
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    listener = socket.create_server(("127.0.0.1", 0))
    with closing(StoreServer(listener, TOKEN.encode(), job="job")) as store:
        port = store.endpoint.port
        yield World(0, 2, 0, 2, "127.0.0.1", port, 0, True, "torchrun", "job", own_store=True)


def gather(world: World) -> list[World]:
    worlds = [replace(world, rank=rank) for rank in range(world.world_size)]
    with ThreadPoolExecutor(len(worlds)) as threads:
        infos = list(threads.map(lambda each: rendezvous(each, timeout=10.0), worlds))
    listener = infos[0].listener
    assert listener is not None
    listener.close()
    return infos


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_without_a_launcher_it_is_a_world_of_one(backend: str) -> None:
    with init(backend, timeout=5.0) as made:
        assert (made.rank, made.world_size, made.timeout) == (0, 1, 5.0)


def test_a_backend_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(BackendUnavailableError, match=r"'zmq'; there are: auto, gloo, .*tcp"):
        init("zmq")


def test_spawn_refuses_what_cannot_be_before_it_starts_anything() -> None:
    with pytest.raises(InvalidWorldSizeError):
        spawn(print, 0)
    with pytest.raises(BackendUnavailableError):
        spawn(print, 2, "zmq")


def test_all_ranks_get_the_address_of_rank_0_and_no_token(behind_a_door: World) -> None:
    first, second = gather(behind_a_door)
    assert first.address == second.address
    assert (first.token, second.token) == (None, None)  # backends read it themselves
    assert second.listener is None
    assert (second.run_id, second.restart_count) == ("job", 0)


def test_without_a_token_torchs_store_brings_an_address_of_this_host(world: World) -> None:
    first, second = gather(world)
    assert first.address == second.address
    assert first.address.startswith("127.0.0.1:")
    assert (first.token, second.token) == (None, None)


def test_torchs_store_brings_a_token_only_where_it_is_trusted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TRUST_STORE", "1")
    first, second = gather(world)
    assert first.token == second.token
    assert len(first.token or "") == 64
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    assert [info.token for info in gather(world)] == [None, None]


@pytest.mark.parametrize("without", [None, 1, 2])
def test_auto_is_nccl_where_every_rank_has_a_gpu_of_its_own(
    world: World, without: int | None
) -> None:
    worlds = [replace(world, rank=rank, world_size=3) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        infos = list(
            threads.map(lambda w: rendezvous(w, timeout=10.0, own_gpu=w.rank != without), worlds)
        )
    assert infos[0].listener is not None
    infos[0].listener.close()
    assert {info.nccl for info in infos} == {without is None}
    assert len({(info.address, info.token) for info in infos}) == 1


def test_ranks_that_meet_again_meet_elsewhere(world: World) -> None:
    assert gather(world)[1].address != gather(world)[1].address


def test_a_restart_does_not_find_the_dead(world: World) -> None:
    gather(world)
    late = replace(world, rank=1, restart_count=1)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 waited .* for rank 0") as caught:
        rendezvous(late, timeout=2.0)  # which includes the connection to the store
    assert caught.value.peer == 0


def test_a_store_that_is_gone_is_named(no_launcher: None) -> None:
    gone = World(1, 2, 1, 2, "127.0.0.1", 1, 0, True, "torchrun")
    for world in (gone, replace(gone, own_store=True)):
        with pytest.raises(BackendUnavailableError, match=r"store at 127\.0\.0\.1:1 "):
            rendezvous(world, timeout=0.05)


def test_a_rank_without_the_token_is_told(
    behind_a_door: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN[::-1])
    with pytest.raises(AuthenticationError, match=r"rank 0: .* the same token \(PHALANX_TOKEN"):
        rendezvous(behind_a_door, timeout=5.0)


def unknown(*_: object, **__: object) -> NoReturn:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("agent_store", ["True", "False"])
def test_a_master_that_nobody_knows_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, rank: str, agent_store: str
) -> None:
    place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": agent_store}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    words = r"node1.* \(MASTER_ADDR\) cannot be resolved.*: Name or service not known"
    with pytest.raises(BackendUnavailableError, match=words):
        init("tcp", timeout=0.05)


def test_without_a_store_rank_0_is_at_the_master(no_launcher: None) -> None:
    info = rendezvous(World(1, 2, 1, 2, "::1", 29500, 0, False, "mpirun"), timeout=1.0)
    assert info.address == "[::1]:29500"
    assert info.token is None
