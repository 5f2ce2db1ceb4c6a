"""Ranks that meet through a store of torch's, and strangers who write there."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    InvalidWorldSizeError,
)
from phalanx.native.store_rendezvous import (
    Entries,
    RendezvousAnswer,
    StoreRendezvous,
    trust_in_torchs_store,
)
from phalanx.wire.control import Endpoint

TOKEN = "a token of many letters"
SCOPE = ("job", 0, "")
ADDRESS = "127.0.0.1:1234"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PHALANX_TOKEN", "PHALANX_TOKEN_FILE", "PHALANX_TRUST_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    return TOKEN


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks each is on a host of its own: a container, or without /proc by its name."""
    hosts = itertools.count()
    for module, name in ((os, "readlink"), (socket, "gethostname")):
        monkeypatch.setattr(module, name, lambda *_: f"host {next(hosts)}")


def meet(
    store: Any, rank: int, size: int = 2, timeout: float = 20.0, address: str = ADDRESS
) -> RendezvousAnswer:
    one = StoreRendezvous(
        Entries(store, SCOPE, trust_in_torchs_store()), rank, size, timeout, "init"
    )
    one.announce()
    return one.exchange(address, "a fresh token")


def all_ranks(store: Any, size: int = 2) -> list[RendezvousAnswer]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: meet(store, rank, size), range(size)))


def failures(*calls: Callable[[], Any]) -> list[Any]:
    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except DistributedError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def entries_of(store: Any) -> dict[str, bytes]:
    return {key: bytes(store.get(key)) for key in store.list_keys()}


def test_all_ranks_hear_the_address_of_rank_0_each_time_they_meet(token: str) -> None:
    store = dist.HashStore()
    for _ in range(3):
        assert {answer.address for answer in all_ranks(store, 4)} == {ADDRESS}


def test_neither_the_token_nor_an_address_by_a_known_key_is_in_the_store(token: str) -> None:
    store = dist.HashStore()
    all_ranks(store)
    for key, value in entries_of(store).items():
        assert token.encode() not in value
        if b"127.0.0.1" in value:
            assert "answer" not in key


def test_who_takes_the_place_of_a_word_is_not_believed(token: str) -> None:
    """He overwrites every word in the store, whatever its key, with those of another token."""
    theirs = dist.HashStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_TOKEN", TOKEN[::-1])
        all_ranks(theirs)
    stolen = list(entries_of(theirs).values())
    store, over = dist.HashStore(), threading.Event()

    def overwrite() -> None:
        number = 0
        while not over.wait(0.0005):
            for key in store.list_keys():
                if "count" not in key:
                    number += 1
                    store.set(key, stolen[number % len(stolen)].decode())

    stranger = threading.Thread(target=overwrite)
    stranger.start()
    try:
        found = failures(*(lambda rank=rank: meet(store, rank, timeout=2.0) for rank in (0, 1)))
    finally:
        over.set()
        stranger.join()
    for each in found:  # they meet, or do not, and by nobody else's word
        assert isinstance(each, CollectiveTimeoutError) or each.address == ADDRESS
        if isinstance(each, CollectiveTimeoutError):
            assert "init" in str(each)


def test_a_word_at_every_key_that_is_known_delays_nobody(token: str) -> None:
    store = dist.HashStore()
    bait = json.dumps({"nonce": "", "address": "127.0.0.1:1"})
    for key in ("1/0", "1/1", "1/address", "1/answer/1", "count/1", "last/0", "last/1"):
        store.set(f"phalanx/job/0//{key}", bait)
    began = time.monotonic()
    assert {answer.address for answer in all_ranks(store)} == {ADDRESS}
    assert time.monotonic() - began < 10


def test_entries_of_an_earlier_rendezvous_are_not_believed(token: str) -> None:
    """He puts those of an earlier start with the same token and name into the store. Rank 0 answers
    them, and the rank that has come now is told so in the end.
    """
    before = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: meet(before, rank, address="127.0.0.1:1"), range(2)))
    again = dist.HashStore()
    for key, value in entries_of(before).items():
        if not value.isdigit():
            again.set(key, value.decode())
    assert meet(again, 0, timeout=2.0).address == ADDRESS  # before rank 1 has come
    (one,) = failures(lambda: meet(again, 1, timeout=2.0))
    assert isinstance(one, CollectiveTimeoutError)
    assert "rank 0's answer is to an earlier start of this rank" in str(one)


def test_a_word_counts_for_its_writer_key_and_scope_only(token: str) -> None:
    store = dist.HashStore()
    own = Entries(store, SCOPE, "sealed")
    own.put("key", 0, "word")
    assert own.look("key", 0) == "word"
    assert own.look("key", 1) is None
    for scope in (("other", 0, ""), ("job", 1, ""), ("job", 0, "group")):
        other = Entries(store, scope, "sealed")
        assert other.look("key", 0) is None
        store.set(other._place("key"), store.get(own._place("key")))
        assert other.look("key", 0) is None
        assert other.strange == 1
    store.set(own._place("another"), store.get(own._place("key")))
    assert own.look("another", 0) is None


def test_ranks_with_different_tokens_are_told_of_the_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    parts = []
    for rank, secret in enumerate((TOKEN, TOKEN[::-1])):
        monkeypatch.setenv("PHALANX_TOKEN", secret)
        parts.append(StoreRendezvous(Entries(store, SCOPE, "sealed"), rank, 2, 2.0, "init"))

    def part(one: StoreRendezvous) -> RendezvousAnswer:
        one.announce()
        return one.exchange(ADDRESS)

    for error in failures(*(lambda one=one: part(one) for one in parts)):
        assert isinstance(error, CollectiveTimeoutError)
        assert "not sealed with this rank's token: do all ranks hold the same" in str(error)
    assert caplog.text.count("is not sealed with this rank's token, and is ignored") == 2


def test_a_rank_without_a_token_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    zero = StoreRendezvous(Entries(store, SCOPE, "sealed"), 0, 2, 5.0, "init")
    monkeypatch.delenv("PHALANX_TOKEN")
    found = failures(zero.announce, lambda: meet(store, 1))
    assert isinstance(found[1], AuthenticationError)
    assert "rank 1 and rank 0 do not hold the same token" in str(found[1])


@pytest.mark.usefixtures("token", "two_hosts")
def test_all_ranks_hear_why_rank_0_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("PHALANX_INTERFACE", "there-is-none")
    parts = [
        StoreRendezvous(Entries(store, SCOPE, "sealed"), rank, 2, 20.0, "init") for rank in (0, 1)
    ]
    zero, one = failures(*(lambda part=part: part.run(Endpoint("::1", 9)) for part in parts))
    assert "PHALANX_INTERFACE" in str(zero)
    assert str(one).startswith(f"rank 1: rank 0 says: {zero}")


# Without a token --------------------------------------------------------------------------------


def test_without_a_token_only_an_address_of_this_host_is_taken() -> None:
    store = dist.HashStore()
    found = failures(
        *(lambda rank=rank: meet(store, rank, address="192.0.2.1:9") for rank in (0, 1))
    )
    assert isinstance(found[1], AuthenticationError)
    for words in ("Set PHALANX_TOKEN", "on every host", "PHALANX_TRUST_STORE=1", "join the job"):
        assert words in str(found[1])


@pytest.mark.usefixtures("two_hosts")
def test_without_a_token_several_hosts_do_not_meet() -> None:
    store = dist.HashStore()
    for error in failures(*(lambda rank=rank: meet(store, rank) for rank in (0, 1))):
        assert isinstance(error, AuthenticationError)
        assert "PHALANX_TRUST_STORE=1" in str(error)


@pytest.mark.usefixtures("two_hosts")
def test_a_store_that_is_trusted_brings_a_token_and_any_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHALANX_TRUST_STORE", "1")
    answers = all_ranks(dist.HashStore())
    assert {answer.token for answer in answers} == {"a fresh token"}


def test_no_token_goes_through_a_store_that_is_not_trusted() -> None:
    store = dist.HashStore()
    assert {answer.token for answer in all_ranks(store)} == {""}
    assert not [value for value in entries_of(store).values() if b"fresh" in value]


@pytest.mark.parametrize("name", ["DistributedError", "SystemExit", "__builtins__", "MisuseError"])
def test_an_error_from_the_store_is_one_of_ours_and_does_nothing_to_a_terminal(name: str) -> None:
    store = dist.HashStore()
    one = StoreRendezvous(Entries(store, SCOPE, "local"), 1, 2, 5.0, "init")
    one.announce()
    said = {"nonce": one._own.nonce, "error": name, "reason": "\x1b[31mred\nline", "peer": 0}
    store.set("phalanx/job/0//1/answer/1", json.dumps(said))
    with pytest.raises(DistributedError) as caught:
        one.exchange()
    assert type(caught.value).__name__ == (name if name == "MisuseError" else "DistributedError")
    assert str(caught.value) == "rank 1: rank 0 says: red line"


@pytest.mark.parametrize("word", ["", "{}", "[" * 5000, "\xff", "1" * 9000, '{"world_size": "x"}'])
def test_garbage_in_place_of_a_word_is_waited_on(word: str) -> None:
    store = dist.HashStore()
    store.set("phalanx/job/0//1/1", word)
    with pytest.raises(CollectiveTimeoutError, match="for rank 1 of 2"):
        meet(store, 0, timeout=0.2)


def test_ranks_of_another_world_size_are_told() -> None:
    store = dist.HashStore()
    found = failures(
        lambda: meet(store, 0, 2), lambda: meet(store, 1, 3), lambda: meet(store, 2, 3)
    )
    assert all(isinstance(error, InvalidWorldSizeError) for error in found)
    assert "rank 0 was told that there are 2 ranks, and rank 1 that there are 3" in str(found[0])
    for error in found[1:]:  # what rank 0 says, or what they see where it has left already
        assert "told that there are 2 ranks, and rank 1 that there are 3" in str(error) or (
            "was told that there are 3 ranks, and rank 0 that there are 2" in str(error)
        )


def test_a_store_that_is_gone_is_named() -> None:
    class Gone(dist.HashStore):  # type: ignore[misc]
        def add(self, *_: object) -> int:
            raise dist.DistNetworkError("failed to recv, got 0 bytes")

    with pytest.raises(BackendUnavailableError, match="is the process that holds it alive"):
        meet(Gone(), 1)
