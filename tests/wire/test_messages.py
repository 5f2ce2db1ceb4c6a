"""The small messages about the job: no pickle, and nothing but what was asked for."""

from __future__ import annotations

import pickle
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import PeerLostError, errors
from phalanx.core.failure import Failure
from phalanx.wire.control import Address, FailureNotice, Table, decode, encode
from phalanx.wire.frame import FrameError

texts = st.text(max_size=50)
ranks = st.integers(0, 10_000)
addresses = st.builds(Address, texts, st.integers(0, 65535), texts)
notices = st.builds(FailureNotice, texts, ranks, ranks, texts, texts, st.integers(-1, 2**40))


@given(addresses | st.builds(Table, st.lists(addresses, max_size=5)) | notices)
def test_what_is_encoded_is_decoded(message: Address | Table | FailureNotice) -> None:
    assert decode(encode(message), type(message)) == message


@given(st.binary(max_size=100), st.sampled_from([Address, Table, FailureNotice]))
def test_bytes_of_any_kind_are_a_message_or_a_frame_error(payload: bytes, kind: type) -> None:
    with suppress(FrameError):
        assert isinstance(decode(payload, kind), kind)


@pytest.mark.parametrize("kind", [Address, Table, FailureNotice])
def test_a_pickle_is_not_a_message(kind: type) -> None:
    with pytest.raises(FrameError):
        decode(pickle.dumps({"host": "x"}), kind)


def test_one_message_is_not_another() -> None:
    with pytest.raises(FrameError, match="Table"):
        decode(encode(Address("::1", 1, "host")), Table)


@pytest.mark.parametrize("name", errors.__all__)
def test_a_failure_keeps_its_kind_on_the_way(name: str) -> None:
    kind = getattr(errors, name)
    failure = Failure(kind, 3, 1, "because")
    arrived = Failure.from_notice(decode(encode(failure.notice()), FailureNotice))
    if issubclass(kind, errors.DistributedError):
        assert arrived == failure
    else:
        assert arrived.error is errors.DistributedError, "only errors may be raised by a peer"


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "annotations", "_rebuild", ""])
def test_a_peer_cannot_name_what_is_raised_here(name: str) -> None:
    notice = FailureNotice(name, 0, 1, "because")
    error = Failure.from_notice(notice).error
    assert issubclass(error, errors.DistributedError)
    assert isinstance(error("x"), Exception)


def test_a_lost_peer_is_the_error_that_python_programmers_know() -> None:
    assert issubclass(PeerLostError, ConnectionError)
