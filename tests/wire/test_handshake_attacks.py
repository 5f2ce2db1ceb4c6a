"""The handshake, attacked: replayed, reflected, forged, flooded."""

from __future__ import annotations

from contextlib import suppress

import pytest
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_handshake import ACCEPTOR, DIALER, LITTLE, acceptor, converse, dialer

from phalanx.wire.handshake import LIMIT, DialerHandshake, Handshake, Identity, Refused


def test_a_recorded_conversation_cannot_be_replayed_to_either_side() -> None:
    said = converse(dialer(), acceptor())
    hello, challenge, proof, welcome = (words for _, words in said)
    side = acceptor()
    side.receive(hello)
    with pytest.raises(Refused, match="same token"):
        side.receive(proof)
    caller = dialer()
    caller.start()
    with pytest.raises(Refused, match="same token"):
        caller.receive(challenge)
    caller = dialer()
    caller.start()
    with pytest.raises(Refused):
        caller.receive(welcome)


def test_what_a_rank_says_cannot_be_reflected_to_it() -> None:
    """Without the token: answer its challenge with its own words, or those of a second call."""
    side, second = acceptor(), acceptor()
    attacker = dialer(token=b"wrong")
    hello = attacker.start()
    challenge = side.receive(hello)
    head, proof = challenge[:7], challenge[-32:]
    with pytest.raises(Refused, match="same token"):
        side.receive(head[:4] + b"\x03\x20\x00" + proof)
    other_proof = second.receive(hello)[-32:]
    side = acceptor()
    side.receive(hello)
    with pytest.raises(Refused, match="same token"):
        side.receive(head[:4] + b"\x03\x20\x00" + other_proof)
    caller = dialer()
    with pytest.raises(Refused):
        caller.receive(caller.start())


def test_a_proof_for_one_rank_does_not_open_another() -> None:
    """A dishonest middle passes rank 2's call to rank 0 on to rank 1."""
    victim = dialer(target=0)
    elsewhere = acceptor(ACCEPTOR._replace(rank=1))
    with pytest.raises(Refused, match="reached rank 1 where rank 0 should be"):
        victim.receive(elsewhere.receive(victim.start()))
    assert not elsewhere.complete


def test_a_proof_does_not_serve_another_identity() -> None:
    caller, side = dialer(), acceptor()
    hello = caller.start()
    forged = hello.replace(
        (2).to_bytes(4, "little") + (4).to_bytes(4, "little"),
        (1).to_bytes(4, "little") + (4).to_bytes(4, "little"),
    )
    assert forged != hello
    with pytest.raises(Refused, match="same token"):
        caller.receive(side.receive(forged))


@settings(max_examples=examples(200))
@given(
    st.lists(st.binary(max_size=300), max_size=8),
    st.booleans(),
    st.sampled_from([b"", b"PHX?", b"PHX?\x01", b"PHX?\x02\x44\x00", b"PHX?\x05\x10\x00"]),
)
def test_bytes_of_any_kind_are_refused_and_cost_little(
    pieces: list[bytes], call: bool, beginning: bytes
) -> None:
    side: Handshake = dialer() if call else acceptor()
    if isinstance(side, DialerHandshake):
        side.start()
    with suppress(Refused):
        for piece in [beginning, *pieces]:
            side.receive(piece)
            assert len(side.surplus) < LITTLE
    assert len(side.farewell) <= LITTLE
    assert not side.complete


def test_a_message_that_announces_much_is_refused_at_its_head() -> None:
    for length in (LIMIT + 1, 2**16 - 1):
        side = acceptor()
        with pytest.raises(Refused, match=f"{length} bytes"):
            side.receive(b"PHX?\x01" + length.to_bytes(2, "little"))


def test_a_attacker_that_never_ends_is_cut_off() -> None:
    side = acceptor()
    side.receive(b"PHX?\x01" + LIMIT.to_bytes(2, "little") + bytes(LIMIT - 1))
    assert side.room == 1
    with pytest.raises(Refused):
        side.receive(bytes(1))


def test_the_reason_of_a_attacker_cannot_write_lines_of_its_own() -> None:
    """It ends up in a log and in an error: control characters must not get there."""
    words = b"nothing\n2026-01-01 rank 0: all is well\x1b[2J\x00"
    with pytest.raises(Refused) as info:
        acceptor().receive(b"PHX?\x05" + len(words).to_bytes(2, "little") + words)
    assert info.value.by_peer
    assert info.value.reason.isprintable()


@pytest.mark.parametrize(
    "claim",
    [
        DIALER,
        DIALER._replace(job="other"),
        DIALER._replace(generation=2),
        DIALER._replace(world_size=5),
        DIALER._replace(rank=0),
        DIALER._replace(rank=4),
    ],
)
@pytest.mark.parametrize("target", [0, 1])
def test_a_caller_that_proves_nothing_learns_nothing_about_the_job(
    claim: Identity, target: int
) -> None:
    """Whatever it says about itself, it gets a challenge, and then only that it failed."""
    side = acceptor()
    challenge = side.receive(dialer(claim, b"wrong", target).start())
    assert challenge[7:11] != ACCEPTOR.rank.to_bytes(4, "little"), "once in 2^32 by chance"
    assert len(challenge) == 7 + 101
    with pytest.raises(Refused, match="do not hold the same token"):
        side.receive(b"PHX?\x03\x20\x00" + bytes(32))
    assert b"token" in side.farewell
