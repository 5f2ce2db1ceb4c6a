from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.wire.control import Endpoint, is_loopback, parse_address


@given(st.ip_addresses().map(str) | st.just("node1.example.org"), st.integers(1, 65535))
def test_an_address_that_is_written_is_read_again(host: str, port: int) -> None:
    assert parse_address(str(Endpoint(host, port))) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "::1:29500", "h:0", "h:65536", "h:x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::1%lo", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("node1", False),
        ("", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
