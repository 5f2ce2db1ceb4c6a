from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.environment import expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[003-005,9]", "node003 node004 node005 node9"),
        ("node[003-005,9],gpu1", "node003 node004 node005 node9 gpu1"),
        ("a,b-c.example.org", "a b-c.example.org"),
        ("rack[1-2]n[01-02]-ib", "rack1n01-ib rack1n02-ib rack2n01-ib rack2n02-ib"),
        ("n[098-101]", "n098 n099 n100 n101"),
    ],
)
def test_short_forms(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize("text", ["", "  ", "node[1", "node]1[", "n[1-]", "n[x]", "n[]", "n[3-1]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"list of|holds no number"):
        expand_hosts(text)


@given(st.lists(st.integers(0, 9999), min_size=1), st.integers(1, 4))
def test_numbers_come_back_in_order_and_width(numbers: list[int], width: int) -> None:
    listed = ",".join(f"{n:0{width}d}" for n in numbers)
    assert expand_hosts(f"n[{listed}]") == [f"n{n:0{width}d}" for n in numbers]


@given(st.text(alphabet="n0123456789[]-, ", max_size=12))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ValueError:
        return
    assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)
