from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.address import address_toward, is_loopback, join_address, split_address


@given(st.ip_addresses().map(str) | st.just("node1.example.org"), st.integers(1, 65535))
def test_an_address_joined_is_split_again(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "::1:29500", "h:0", "h:65536", "h:x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("node1", False),
        ("", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_ranks_of_one_host_stay_on_it() -> None:
    assert address_toward("node1.invalid", 29500, one_host=True) == "127.0.0.1"
