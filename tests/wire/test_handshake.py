"""The handshake, with two peers joined in memory: who is let in, and who is told what."""

from __future__ import annotations

import pytest
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.wire import handshake
from phalanx.wire.handshake import AcceptorHandshake, DialerHandshake, Handshake, Identity, Refused

TOKEN = b"the token"
ACCEPTOR = Identity("job", 3, 0, 4)
DIALER = Identity("job", 3, 2, 4)
LITTLE = 1024  # bytes that an unauthenticated connection may cost


def welcome_all(peer: int) -> str | None:
    return None


def dialer(identity: Identity = DIALER, token: bytes = TOKEN, target: int = 0) -> DialerHandshake:
    return DialerHandshake(identity, token, target)


def acceptor(identity: Identity = ACCEPTOR, token: bytes = TOKEN) -> AcceptorHandshake:
    return AcceptorHandshake(identity, token, welcome_all)


def converse(one: DialerHandshake, other: AcceptorHandshake) -> list[tuple[str, bytes]]:
    """Carry bytes between the two until neither has anything to say; what was said, in order."""
    said = [("dialer", one.start())]
    while said[-1][1]:
        speaker, words = said[-1]
        listener: Handshake = other if speaker == "dialer" else one
        said.append(("acceptor" if speaker == "dialer" else "dialer", listener.receive(words)))
    return said[:-1]


def refusal(one: DialerHandshake, other: AcceptorHandshake) -> tuple[Handshake, Refused]:
    """Which side refuses, and why; the other side is told the same."""
    speaker: Handshake = one
    listener: Handshake = other
    words = one.start()
    for _ in range(6):
        try:
            words = listener.receive(words)
        except Refused as refused:
            why = refused
            break
        speaker, listener = listener, speaker
    else:
        raise AssertionError("nobody refused")
    assert not listener.complete
    assert not why.by_peer
    with pytest.raises(Refused) as told:
        speaker.receive(listener.farewell)
    assert told.value.by_peer
    assert told.value.reason == why.reason
    return listener, why


def test_two_ranks_of_a_job_let_each_other_in() -> None:
    one, other = dialer(), acceptor()
    said = converse(one, other)
    assert [who for who, _ in said] == ["dialer", "acceptor", "dialer", "acceptor"]
    assert one.complete
    assert other.complete
    assert (one.peer, other.peer) == (0, 2)
    assert one.surplus == other.surplus == b""
    assert sum(len(words) for _, words in said) < LITTLE


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.binary(max_size=50))
def test_any_split_of_the_bytes_gives_the_same_and_what_follows_is_kept(
    cuts: list[int], after: bytes
) -> None:
    one, other = dialer(), acceptor()

    def trickle(listener: Handshake, words: bytes) -> bytes:
        reply = b""
        for cut in cuts:
            reply += listener.receive(words[:cut])
            words = words[cut:]
        return reply + (listener.receive(words) if words else b"")

    challenge = trickle(other, one.start())
    proof = trickle(one, challenge)
    welcome = trickle(other, proof + after)
    assert other.complete
    assert other.surplus == after
    trickle(one, welcome + after)
    assert one.complete
    assert one.surplus == after


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (DIALER._replace(job="other"), "another job"),
        (DIALER._replace(generation=2), "is of generation 2, this rank 3"),
        (DIALER._replace(world_size=5), "has world size 5, this rank 4"),
        (DIALER._replace(rank=0), "says that it is rank 0 of 4, to rank 0"),
        (DIALER._replace(rank=4), "says that it is rank 4 of 4"),
        (DIALER._replace(rank=2**32 - 1), "says that it is rank 4294967295 of 4"),
    ],
)
def test_a_rank_with_another_identity_is_turned_away_and_told_why(
    other: Identity, words: str
) -> None:
    side = acceptor()
    by, refused = refusal(dialer(other), side)
    assert by is side
    assert words in refused.reason


def test_a_caller_that_looks_for_another_rank_is_turned_away() -> None:
    _, refused = refusal(dialer(target=1), acceptor())
    assert "reached rank 0 where rank 1 should be" in refused.reason


@pytest.mark.parametrize("theirs", [b"", b"The token", b"the token ", b"x" * 10_000])
def test_without_the_same_token_neither_side_lets_the_other_in(theirs: bytes) -> None:
    caller = dialer(token=theirs)
    by, refused = refusal(caller, acceptor())
    assert by is caller, "the acceptor has to prove itself first"
    assert "do not hold the same token" in refused.reason
    assert "PHALANX_TOKEN" in refused.reason


def test_another_version_of_the_protocol_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = dialer()
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 1)
    hello = caller.start()
    monkeypatch.undo()
    ours = handshake.PROTOCOL_VERSION
    with pytest.raises(Refused, match=f"speaks protocol version 1, this rank {ours}"):
        acceptor().receive(hello)


def test_an_unauthenticated_caller_is_not_told_whether_a_rank_is_there() -> None:
    asked: list[int] = []

    def admit(peer: int) -> str | None:
        asked.append(peer)
        return f"rank {peer} is here already"

    side = AcceptorHandshake(ACCEPTOR, TOKEN, admit)
    other = dialer(token=b"wrong")
    side.receive(other.start())
    forged = DialerHandshake(DIALER, b"wrong", 0).start()[:4] + b"\x03\x20\x00" + bytes(32)
    with pytest.raises(Refused, match="do not hold the same token"):
        side.receive(forged)
    assert asked == []

    side = AcceptorHandshake(ACCEPTOR, TOKEN, admit)
    by, refused = refusal(dialer(), side)
    assert by is side
    assert (refused.reason, asked) == ("rank 2 is here already", [2])
