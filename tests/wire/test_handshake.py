"""The handshake, with two peers joined in memory: who is let in, and who is told what."""

from __future__ import annotations

import pytest
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.wire.handshake import (
    NO_OFFER,
    PROTOCOL_VERSION,
    AcceptorHandshake,
    DialerHandshake,
    Handshake,
    Identity,
    Offer,
    Refused,
    Stance,
)

TOKEN = b"the token"
ACCEPTOR = Identity("job", 3, 0, 4)
DIALER = Identity("job", 3, 2, 4)
LITTLE = 1024  # bytes that an unauthenticated connection may cost


def welcome_all(peer: int) -> str | None:
    return None


def dialer(
    identity: Identity = DIALER, token: bytes = TOKEN, target: int = 0, offer: Offer = NO_OFFER
) -> DialerHandshake:
    return DialerHandshake(identity, token, target, offer)


def acceptor(
    identity: Identity = ACCEPTOR, token: bytes = TOKEN, offer: Offer = NO_OFFER
) -> AcceptorHandshake:
    return AcceptorHandshake(identity, token, welcome_all, offer)


def able(name: bytes, *, apart: bool = True) -> Offer:
    """The offer of a side that can speak TLS, with a certificate of that name."""
    return Offer(Stance.ABLE, apart, lambda: name.ljust(32))


def converse(one: DialerHandshake, other: AcceptorHandshake) -> list[tuple[str, bytes]]:
    """Carry bytes between the two until neither has anything to say; what was said, in order."""
    said = [("dialer", one.start())]
    while said[-1][1]:
        speaker, words = said[-1]
        listener: Handshake = other if speaker == "dialer" else one
        reply = listener.receive(words)
        if other.begins_tls:
            assert reply == other.enter_tls() == b""
            said.append(("dialer", one.enter_tls()))
        else:
            said.append(("acceptor" if speaker == "dialer" else "dialer", reply))
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


def test_another_version_of_the_protocol_is_told_apart() -> None:
    hello, ours = dialer().start(), PROTOCOL_VERSION.to_bytes(2, "little")
    before, version, after = hello.partition(ours)
    assert len(before) == 7, "the version is what a caller says first"
    with pytest.raises(Refused, match=f"speaks protocol version 1, this rank {PROTOCOL_VERSION}"):
        acceptor().receive(before + (1).to_bytes(len(version), "little") + after)


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


# TLS --------------------------------------------------------------------------------------------

OFF, CANNOT, ABLE = Stance
PLAIN, SPOKEN = "plain", "TLS"
AGREEMENTS = {  # of the dialer, rank 2, and the acceptor, rank 0, on different hosts
    (OFF, OFF): PLAIN,
    (OFF, CANNOT): PLAIN,
    (OFF, ABLE): "rank 2 has PHALANX_TLS=off, and rank 0",
    (CANNOT, OFF): PLAIN,
    (CANNOT, CANNOT): PLAIN,
    (CANNOT, ABLE): "rank 2 lacks TLS (pip install 'phalanx[tls]'), and rank 0",
    (ABLE, OFF): "rank 0 has PHALANX_TLS=off, and rank 2",
    (ABLE, CANNOT): "rank 0 lacks TLS (pip install 'phalanx[tls]'), and rank 2",
    (ABLE, ABLE): SPOKEN,
}


@pytest.mark.parametrize("apart", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("stances", "agreed"), AGREEMENTS.items())
def test_whether_tls_is_spoken(
    stances: tuple[Stance, Stance], agreed: str, apart: tuple[bool, bool]
) -> None:
    one, other = (
        Offer(stance, far, lambda: b"a certificate".ljust(32))
        for stance, far in zip(stances, apart, strict=True)
    )
    caller, called = dialer(offer=one), acceptor(offer=other)
    if agreed in (PLAIN, SPOKEN):
        converse(caller, called)
        assert caller.complete
        assert called.complete
        assert [bool(caller.fingerprint), bool(called.fingerprint)] == [agreed == SPOKEN] * 2
    else:
        by, refused = refusal(caller, called)
        assert by is caller, "before it proves itself"
        assert agreed in refused.reason
        assert refused.reason.endswith("on every host"), "it fits into the message"


@pytest.mark.parametrize("stances", AGREEMENTS)
def test_inside_a_host_it_is_not_and_nobody_makes_a_certificate(
    stances: tuple[Stance, Stance],
) -> None:
    def make() -> bytes:
        raise AssertionError("a certificate was made")

    one, other = (Offer(stance, False, make) for stance in stances)
    caller, called = dialer(offer=one), acceptor(offer=other)
    converse(caller, called)
    assert caller.complete
    assert called.complete


def test_within_tls_each_side_knows_the_others_certificate_and_the_last_words_are_said_there() -> (
    None
):
    one, other = dialer(offer=able(b"dialer's")), acceptor(offer=able(b"acceptor's"))
    said = converse(one, other)
    assert [who for who, _ in said] == ["dialer", "acceptor", "dialer", "dialer", "acceptor"]
    assert (one.fingerprint, other.fingerprint) == (b"acceptor's".ljust(32), b"dialer's".ljust(32))
    assert one.complete
    assert other.complete
    assert sum(len(words) for _, words in said) < LITTLE


def test_a_dialer_that_goes_on_although_they_disagree_is_turned_away_by_name() -> None:
    class Defiant(DialerHandshake):
        __slots__ = ()

        def _refuse(self, reason: str) -> Refused:
            self.proved = True
            return Refused(reason)

    one, other = Defiant(DIALER, TOKEN, 0, Offer(CANNOT, apart=True)), acceptor(offer=able(b"mine"))
    challenge = other.receive(one.start())
    with pytest.raises(Refused):
        one.receive(challenge)
    transcript = one._hello + challenge[7:-32]
    proof = b"PHX?\x03\x20\x00" + one._proof(b"dialer", transcript)
    with pytest.raises(Refused, match="rank 2 lacks TLS"):
        other.receive(proof)
    assert not other.complete


def test_plain_text_behind_the_proof_is_refused() -> None:
    one, other = dialer(offer=able(b"dialer's")), acceptor(offer=able(b"acceptor's"))
    proof = one.receive(other.receive(one.start()))
    assert other.room == 7, "a driver does not read what belongs to TLS"
    other.receive(proof + b"PHLX and so on")
    with pytest.raises(Refused, match="plain text where TLS was agreed"):
        other.enter_tls()


def test_a_rank_is_admitted_only_within_tls() -> None:
    asked: list[int] = []
    side = AcceptorHandshake(ACCEPTOR, TOKEN, asked.append, able(b"acceptor's"))  # type: ignore[arg-type]
    one = dialer(offer=able(b"dialer's"))
    side.receive(one.receive(side.receive(one.start())))
    assert asked == []
    side.enter_tls()
    side.receive(one.enter_tls())
    assert asked == [2]


def test_the_end_of_one_tunnel_does_not_serve_another_conversation() -> None:
    """Two calls of one rank, whose tunnels a middle has swapped: they show the same certificate."""
    calls = [
        (dialer(offer=able(b"one for all")), acceptor(offer=able(b"one for all"))) for _ in range(2)
    ]
    seals = []
    for one, other in calls:
        other.receive(one.receive(other.receive(one.start())))
        other.enter_tls()
        seals.append(one.enter_tls())
    for (_, other), seal in zip(calls, reversed(seals), strict=True):
        with pytest.raises(Refused, match="same token"):
            other.receive(seal)
