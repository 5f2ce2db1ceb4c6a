"""The handshake's proofs cover every word of it: whatever a middle changes, nobody gets in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_handshake import ACCEPTOR, DIALER, TOKEN, able, acceptor, converse, dialer

from phalanx.wire.handshake import (
    LIMIT,
    PROTOCOL_VERSION,
    AcceptorHandshake,
    DialerHandshake,
    Handshake,
    Refused,
)

HEAD = 7
# Where each field of HELLO lies, behind the head of the message.
HELLO_FIELDS = {
    "version": (0, 2),
    "job": (2, 18),
    "generation": (18, 22),
    "rank": (22, 26),
    "world size": (26, 30),
    "target": (30, 34),
    "offer": (34, 35),
    "nonce": (35, 67),
}
CHALLENGE_FIELDS = {
    "rank": (0, 4),
    "offer": (4, 5),
    "fingerprint": (5, 37),
    "nonce": (37, 69),
    "proof": (69, 101),
}
Change = Callable[[bytes], bytes]


def let_in(
    one: DialerHandshake, other: AcceptorHandshake, changes: dict[int, Change]
) -> tuple[bool, bool]:
    """Whether (dialer, acceptor) let the other in, if a middle changes the n-th message."""
    words, speaker, listener = one.start(), one, other  # type: tuple[bytes, Handshake, Handshake]
    for number in range(5):
        words = changes.get(number, bytes)(words)
        try:
            words = listener.receive(words)
            if other.begins_tls:
                words = other.enter_tls() + one.enter_tls()
                continue
        except Refused:
            break
        speaker, listener = listener, speaker
    return one.complete, other.complete


def flip(bit: int) -> Change:
    def change(words: bytes) -> bytes:
        changed = bytearray(words)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    return change


def put(field: tuple[int, int], value: bytes) -> Change:
    start, end = field
    assert end - start == len(value)
    return lambda words: words[: HEAD + start] + value + words[HEAD + end :]


def number(value: int) -> bytes:
    return value.to_bytes(4, "little")


def test_no_bit_of_the_conversation_can_be_changed() -> None:
    assert let_in(dialer(), acceptor(), {}) == (True, True)
    lengths = [len(words) for _, words in converse(dialer(), acceptor())]
    assert lengths == [HEAD + 67, HEAD + 101, HEAD + 32, HEAD]
    for message, length in enumerate(lengths):
        for bit in range(8 * length):
            result = let_in(dialer(), acceptor(), {message: flip(bit)})
            # The last word is said when the acceptor has been convinced already.
            assert result == (False, message == 3), (message, bit)


def test_no_bit_of_the_conversation_about_tls_can_be_changed() -> None:
    """Neither can TLS be turned off, nor on, nor a certificate be put in place of another."""

    def both() -> tuple[DialerHandshake, AcceptorHandshake]:
        return dialer(offer=able(b"dialer's")), acceptor(offer=able(b"acceptor's"))

    assert let_in(*both(), {}) == (True, True)
    lengths = [len(words) for _, words in converse(*both())]
    assert lengths == [HEAD + 67, HEAD + 101, HEAD + 64, HEAD + 32, HEAD]
    for message, length in enumerate(lengths):
        for bit in range(8 * length):
            assert let_in(*both(), {message: flip(bit)}) == (False, message == 4), (message, bit)


@pytest.mark.parametrize("apart", [True, False])
def test_a_middle_cannot_change_what_a_rank_says_about_tls(apart: bool) -> None:
    for offer in range(256):
        caller = dialer(offer=able(b"dialer's", apart=apart))
        changes = {0: put(HELLO_FIELDS["offer"], bytes([offer]))}
        found = let_in(caller, acceptor(offer=able(b"acceptor's", apart=False)), changes)
        same = offer == caller._offer.byte
        assert found == ((True, True) if same else (False, False)), offer


CALLERS = {
    "job": (DIALER._replace(job="other"), ACCEPTOR.job_digest),
    "generation": (DIALER._replace(generation=2), number(3)),
    "rank": (DIALER._replace(rank=3), number(2)),
    "world size": (DIALER._replace(world_size=5), number(4)),
}


@pytest.mark.parametrize("field", CALLERS)
def test_a_middle_cannot_make_a_rank_look_like_another(field: str) -> None:
    caller, wanted = CALLERS[field]
    forged = {0: put(HELLO_FIELDS[field], wanted)}
    assert let_in(dialer(caller), acceptor(), forged) == (False, False)


class DialerOfBefore(DialerHandshake):
    """A dialer that speaks version 1."""

    def start(self) -> bytes:
        hello = put(HELLO_FIELDS["version"], b"\x01\x00")(super().start())
        self._hello = hello[HEAD:]  # which its proof covers
        return hello


def test_a_middle_cannot_talk_a_rank_into_another_version() -> None:
    caller = DialerOfBefore(DIALER, TOKEN, 0)
    forged = put(HELLO_FIELDS["version"], PROTOCOL_VERSION.to_bytes(2, "little"))(caller.start())
    with pytest.raises(Refused, match="same token"):
        caller.receive(acceptor().receive(forged))


def test_a_middle_cannot_pass_a_call_on_to_another_rank() -> None:
    """Rank 2 calls rank 0, whose place a middle has taken: it asks rank 1 for the proofs."""
    forged = {
        0: put(HELLO_FIELDS["target"], number(1)),
        1: put(CHALLENGE_FIELDS["rank"], number(0)),
    }
    elsewhere = acceptor(ACCEPTOR._replace(rank=1))
    assert let_in(dialer(), elsewhere, forged) == (False, False)
    del forged[1]
    elsewhere = acceptor(ACCEPTOR._replace(rank=1))
    assert let_in(dialer(), elsewhere, forged) == (False, False)


def test_a_middle_cannot_swap_the_nonces_or_proofs_of_two_calls() -> None:
    recorded = [words for _, words in converse(dialer(), acceptor())]
    for message, fields in ((0, HELLO_FIELDS), (1, CHALLENGE_FIELDS)):
        for name, (start, end) in fields.items():
            old = recorded[message][HEAD + start : HEAD + end]
            result = let_in(dialer(), acceptor(), {message: put((start, end), old)})
            fresh = name == "nonce" or message == 1  # CHALLENGE is masked with what follows from it
            assert result == ((False, False) if fresh else (True, True)), name
    assert let_in(dialer(), acceptor(), {2: lambda _: recorded[2]}) == (False, False)


def test_a_thousand_replays_authenticate_nobody() -> None:
    hello, _, proof, _ = (words for _, words in converse(dialer(), acceptor()))
    challenges = set()
    for _ in range(1000):
        side = acceptor()
        challenges.add(side.receive(hello))
        with pytest.raises(Refused, match="same token"):
            side.receive(proof)
        assert not side.complete
    assert len(challenges) == 1000


def test_a_rank_cannot_be_made_to_answer_itself() -> None:
    """Rank 2 calls an attacker, which calls rank 2 with what it says, turned round as it can be."""
    victim = dialer()
    hello = victim.start()
    here = AcceptorHandshake(DIALER, TOKEN, lambda peer: None)
    with pytest.raises(Refused, match="reached rank 2 where rank 0 should be"):
        victim.receive(here.receive(hello))
    victim = dialer()
    hello = victim.start()
    turned = put(HELLO_FIELDS["target"], number(2))(put(HELLO_FIELDS["rank"], number(0))(hello))
    here = AcceptorHandshake(DIALER, TOKEN, lambda peer: None)
    challenge = put(CHALLENGE_FIELDS["rank"], number(0))(here.receive(turned))
    with pytest.raises(Refused, match="same token"):
        victim.receive(challenge)
    assert not here.complete


@pytest.mark.parametrize("side", [dialer, acceptor])
def test_a_driver_that_reads_what_there_is_room_for_keeps_one_message(
    side: Callable[[], Handshake],
) -> None:
    listener = side()
    words = b"PHX?\x02" + LIMIT.to_bytes(2, "little") + bytes(1000)
    try:
        while words:
            count = listener.room
            assert 0 < count <= HEAD + LIMIT
            listener.receive(words[:count])
            words = words[count:]
            assert len(listener.surplus) <= HEAD + LIMIT
    except Refused:
        pass
    assert not listener.complete
