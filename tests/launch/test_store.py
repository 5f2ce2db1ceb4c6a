"""The launcher's store: who is let in, what is bounded, and what a stranger gets."""

from __future__ import annotations

import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import msgspec
import pytest
from waiting import wait_until

from phalanx.errors import AuthenticationError, BackendUnavailableError
from phalanx.launch.server import call
from phalanx.launch.store import (
    MOST_CLIENTS,
    MOST_KEYS,
    MOST_MEMORY,
    MOST_VALUE,
    StoreClient,
    StoreReply,
    StoreRequest,
    StoreServer,
    connect_store,
    listen_for_store,
)
from phalanx.transport.tcp.tls import Tls
from phalanx.wire.handshake import Identity

TOKEN = "a token of many letters"
PATIENCE = 20.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def hold(stack: ExitStack) -> StoreServer:
    listener = listen_for_store("127.0.0.1", 0)
    return stack.enter_context(closing(StoreServer(listener, TOKEN.encode(), job="job")))


def join(stack: ExitStack, server: StoreServer) -> StoreClient:
    deadline = time.monotonic() + PATIENCE
    return stack.enter_context(closing(connect_store(server.endpoint, TOKEN, deadline, job="job")))


def raw(stack: ExitStack, server: StoreServer) -> socket.socket:
    """A client that has proved itself, and says what it likes."""
    token, identity = TOKEN.encode(), Identity("phalanx store job", 0, 1, 2)
    sock, _ = call(server.endpoint, identity, token, Tls(token), PATIENCE)
    return stack.enter_context(sock)


def read_reply(sock: socket.socket) -> StoreReply:
    (length,) = struct.unpack("<I", read(sock, 4))
    return msgspec.msgpack.decode(read(sock, length), type=StoreReply)


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, "it has hung up"
        data += part
    return data


def message(*words: object) -> bytes:
    content = msgspec.msgpack.encode(words)
    return struct.pack("<I", len(content)) + content


def test_every_operation_does_what_it_says(stack: ExitStack) -> None:
    server = hold(stack)
    own, other = join(stack, server), join(stack, server)
    for store, reader, name in ((own, other, "a"), (other, own, "b")):
        assert store.get(f"{name}/1") is None
        store.set(f"{name}/1", "one")
        store.set(f"{name}/2", b"\x00\xff")
        assert (reader.get(f"{name}/1"), reader.get(f"{name}/2")) == (b"one", b"\x00\xff")
        assert [store.add(name, number) for number in (1, 0, -3)] == [1, 1, -2]
        assert reader.add(name, 0) == -2
        store.set(f"{name}/1", "again")
        assert reader.get(f"{name}/1") == b"again"


def test_of_those_who_compare_and_set_the_first_is_heard(stack: ExitStack) -> None:
    server = hold(stack)
    own, other = join(stack, server), join(stack, server)
    assert own.compare_set("key", b"", b"first") == b"first"
    assert other.compare_set("key", b"", b"second") == b"first"
    assert other.compare_set("key", b"first", b"second") == b"second"
    assert own.compare_set("other", b"first", b"second") == b""
    assert (own.get("key"), own.get("other")) == (b"second", None)
    full = b"x" * MOST_VALUE
    own.set("key", full)
    assert own.compare_set("key", full, full[1:]) == full[1:]


def test_a_value_that_comes_is_heard_at_once_by_all_who_wait(stack: ExitStack) -> None:
    server = hold(stack)
    clients = [join(stack, server) for _ in range(3)]
    heard: list[bytes | None] = []
    threads = [
        threading.Thread(target=lambda each=each: heard.append(each.wait("key", PATIENCE)))
        for each in clients
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.waiting.get("key", ())) == 3)
    join(stack, server).set("key", "value")
    for thread in threads:
        thread.join(PATIENCE)
    assert heard == [b"value"] * 3
    assert not server.waiting


def test_who_has_waited_in_vain_goes_on(stack: ExitStack) -> None:
    server = hold(stack)
    store = join(stack, server)
    assert store.wait("key", 0.01) is None
    assert not server.waiting
    store.set("key", "value")
    assert store.wait("key", 0.01) == b"value"


def test_a_wait_hears_a_signal(stack: ExitStack) -> None:
    store = join(stack, hold(stack))

    def hear(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, hear)
    stack.callback(signal.signal, signal.SIGALRM, before)
    stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)  # before there is no handler any more

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        store.wait("key", PATIENCE)

    with pytest.raises(KeyboardInterrupt):
        wait()


# Strangers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "job"), [("", "job"), (TOKEN[::-1], "job"), (TOKEN, "another job")]
)
def test_who_is_not_of_the_job_is_turned_away(stack: ExitStack, token: str, job: str) -> None:
    server = hold(stack)
    with pytest.raises(AuthenticationError, match=rf"store at {server.endpoint} .* not of one job"):
        connect_store(server.endpoint, token, time.monotonic() + PATIENCE, job=job)
    assert not server.clients


def test_words_of_torchs_store_get_nothing_and_change_nothing(stack: ExitStack) -> None:
    """What the client of a TCPStore says first, and garbage; others are served meanwhile."""
    server = hold(stack)
    store = join(stack, server)
    store.set("key", "value")
    for said in (b"\x09" + struct.pack("<I", 0x3C85F7CE), b"\x00" * 600, secrets.token_bytes(512)):
        with socket.create_connection(server.endpoint, PATIENCE) as stranger:
            stranger.sendall(said)
            got = b""
            try:
                while part := stranger.recv(4096):
                    got += part
            except ConnectionResetError:
                pass
        assert b"value" not in got
        assert store.get("key") == b"value"
    assert len(server.clients) == 1


def test_many_silent_strangers_do_not_keep_a_client_out(stack: ExitStack) -> None:
    server = hold(stack)
    for _ in range(300):
        stack.enter_context(socket.create_connection(server.endpoint, PATIENCE))
    assert join(stack, server).add("count", 1) == 1


def test_a_server_that_says_nothing_is_called_again(stack: ExitStack) -> None:
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    place = silent.getsockname()
    with pytest.raises(BackendUnavailableError, match=rf"reached at 127.0.0.1:{place[1]} \(timed"):
        connect_store(hold(stack).endpoint._replace(port=place[1]), TOKEN, time.monotonic() + 0.1)


# Bounds -----------------------------------------------------------------------------------------


def fill(server: StoreServer, keys: int, value: bytes) -> None:
    """Set keys at once, without a client's messages."""
    with server.lock:
        for number in range(keys):
            assert not server.answer(StoreRequest("set", str(number), value)).error


def test_a_client_beyond_the_bound_on_memory_is_told_and_the_others_go_on(stack: ExitStack) -> None:
    server = hold(stack)
    store, other = join(stack, server), join(stack, server)
    full = b"x" * MOST_VALUE
    fill(server, MOST_MEMORY // (MOST_VALUE + 200 + 4), full)  # with a key of up to 4 characters
    with pytest.raises(
        BackendUnavailableError, match=f"b: the store is full, it has {MOST_MEMORY} bytes"
    ):
        store.set("b", full)
    before = server.memory
    assert other.get("0") == full
    other.set("0", "")
    assert server.memory == before - MOST_VALUE
    store.set("b", full)  # there is room again
    assert server.memory == before + len("b") + 200


def test_a_client_beyond_the_bound_on_keys_is_told_and_the_others_go_on(stack: ExitStack) -> None:
    server = hold(stack)
    store, other = join(stack, server), join(stack, server)
    fill(server, MOST_KEYS, b"")
    for write in (lambda: store.add("d", 1), lambda: store.compare_set("d", b"", b"1")):
        with pytest.raises(
            BackendUnavailableError, match=f"d: the store is full, it has {MOST_KEYS} keys"
        ):
            write()
    assert other.get("0") == b""
    store.set("0", "again")
    assert other.get("0") == b"again"


def test_an_add_to_what_is_no_number_is_told(stack: ExitStack) -> None:
    store = join(stack, hold(stack))
    store.set("word", "\x1b[31mred")
    with pytest.raises(BackendUnavailableError, match="word: its value is no number"):
        store.add("word", 1)
    store.add("number", (1 << 62))
    with pytest.raises(BackendUnavailableError, match="number: a number of more than 63 bits"):
        store.add("number", (1 << 62))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"\xff\xff\xff\xff", "a message of 4294967295 bytes, and the longest has"),
        (message("set", "k" * 257, b""), "cannot be read"),
        (message("set", "k", b"x" * (MOST_VALUE + 1)), "cannot be read"),
        (message("steal", "k"), "cannot be read"),
        (message("add", "k", b"", "1"), "cannot be read"),
        (message("compare_set", "k", b"", 0, b"x" * (MOST_VALUE + 1)), "cannot be read"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "cannot be read"),
        (struct.pack("<I", 0) + b"more", "cannot be read"),
        (struct.pack("<I", 60_000) + b"\x91" * 60_000, "cannot be read"),
    ],
)
def test_what_is_no_request_is_told_and_hung_up_on(
    stack: ExitStack, said: bytes, told: str
) -> None:
    server = hold(stack)
    store, client = join(stack, server), raw(stack, server)
    client.sendall(said)
    assert told in read_reply(client).error
    with suppress(ConnectionResetError):  # what it had sent behind that was not read
        assert client.recv(1) == b""
    assert store.add("count", 1) == 1


def test_a_client_that_takes_no_replies_keeps_one_and_no_more(stack: ExitStack) -> None:
    server = hold(stack)
    store, client = join(stack, server), raw(stack, server)
    store.set("key", b"x" * MOST_VALUE)
    client.setblocking(False)
    request = message("get", "key")
    try:
        for _ in range(1_000_000):
            client.sendall(request)
    except BlockingIOError:
        pass
    assert store.get("key") is not None
    unsent = [len(each._unsent) for each in server.clients]
    assert max(unsent) <= MOST_VALUE + 64


class Somebody:
    """A client that takes a place and no file, of which a process may have too few."""

    def close(self) -> None:
        pass


def test_the_clients_beyond_the_bound_wait_for_a_place(stack: ExitStack) -> None:
    server = hold(stack)
    first = join(stack, server)
    others = {Somebody() for _ in range(MOST_CLIENTS - 1)}
    server.clients |= others  # type: ignore[arg-type]
    soon = time.monotonic() + 0.1
    with pytest.raises(
        BackendUnavailableError, match=f"{MOST_CLIENTS} clients are there already: try again"
    ):
        connect_store(server.endpoint, TOKEN, soon, job="job")
    first.close()
    assert join(stack, server).add("count", 1) == 1


def test_a_store_that_has_ended_is_named_with_the_key(stack: ExitStack) -> None:
    server = hold(stack)
    store = join(stack, server)
    server.close()
    words = rf"store at {server.endpoint} does not answer any more .* key 'k'\).* launcher"
    with pytest.raises(BackendUnavailableError, match=words):
        store.get("k")
