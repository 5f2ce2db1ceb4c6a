"""Without a token, only processes of this user and of root are let in: whose a peer's is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from listening import needs_proc
from users import OTHER, as_root, other_user

from phalanx.transport.tcp import addresses
from phalanx.transport.tcp.addresses import stranger, uid_of_peer

HOSTS = ["127.0.0.1", "::1"]

pytestmark = needs_proc


@contextmanager
def connection(host: str, family: int = 0) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection inside this process: caller, accepted."""
    family = family or (socket.AF_INET6 if ":" in host else socket.AF_INET)
    both = family == socket.AF_INET6 and ":" not in host
    with (
        socket.create_server(("" if both else host, 0), family=family, dualstack_ipv6=both) as here,
        socket.create_connection((host, here.getsockname()[1])) as caller,
    ):
        accepted, _ = here.accept()
        with accepted:
            yield caller, accepted


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without Linux's way to ask the kernel about sockets."""
    monkeypatch.delattr(socket, "AF_NETLINK", raising=False)


LOOKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "sock_diag": lambda _: None,
    "proc": blind,
}


@pytest.fixture(params=LOOKS.values(), ids=LOOKS.keys(), autouse=True)
def _look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.param(monkeypatch)


@pytest.mark.parametrize("host", HOSTS)
def test_both_ends_of_a_connection_of_this_process_are_of_this_user(host: str) -> None:
    with connection(host) as ends:
        assert [uid_of_peer(end) for end in ends] == [os.geteuid()] * 2
        assert [stranger(end) for end in ends] == ["", ""]


def test_a_socket_of_both_families_is_found_from_both_sides() -> None:
    with connection("127.0.0.1", socket.AF_INET6) as ends:
        assert [uid_of_peer(end) for end in ends] == [os.geteuid()] * 2


def test_who_has_hung_up_is_nobody() -> None:
    """The kernel has such a socket as root's; the end that is left is nobody's friend."""
    with connection("127.0.0.1") as (caller, accepted):
        caller.close()
        assert uid_of_peer(accepted) is None
        assert "does not show whose process" in stranger(accepted)
        accepted.close()
        assert uid_of_peer(accepted) is None


def test_a_call_that_nobody_has_accepted_is_nobodys() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as here,
        socket.create_connection(here.getsockname()) as caller,
    ):
        assert uid_of_peer(caller) is None


def test_who_only_listens_is_at_the_end_of_no_connection() -> None:
    """The kernel answers with the listener where there is no such connection."""
    nobody = addresses._end(("127.0.0.1", 9))
    with socket.create_server(("127.0.0.1", 0)) as here:
        listener = addresses._end(here.getsockname())
        assert addresses._ask_kernel(listener, nobody) is None
        assert addresses._read_table(listener, nobody) is None


def test_where_the_system_does_not_say_the_reason_names_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> NoReturn:
        raise FileNotFoundError(path)

    blind(monkeypatch)
    monkeypatch.setattr(Path, "read_text", refuse)
    with connection("127.0.0.1") as ends:
        for end in ends:
            assert "does not show whose process" in stranger(end)
            assert "PHALANX_TOKEN" in stranger(end)


@as_root
@pytest.mark.parametrize("host", HOSTS)
def test_another_user_who_calls_is_a_stranger(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as here:
        calls: list[socket.socket] = []
        place = here.getsockname()[:2]
        with other_user(lambda: calls.append(socket.create_connection(place))):
            accepted, _ = here.accept()
            with accepted:
                assert uid_of_peer(accepted) == OTHER
                assert f"it is user {OTHER}'s" in stranger(accepted)
                assert "PHALANX_TOKEN" in stranger(accepted)
                monkeypatch.setattr(os, "geteuid", lambda: OTHER)
                assert not stranger(accepted)


@as_root
def test_another_user_who_is_called_is_a_stranger() -> None:
    kept: list[socket.socket] = []
    here = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        kept.append(here.accept()[0])

    with here, socket.create_connection(here.getsockname()) as caller, other_user(accept):
        assert uid_of_peer(caller) == OTHER, "who accepts it, not who listens"
        assert f"it is user {OTHER}'s" in stranger(caller)
