"""What the engine asks of a transport: to move messages, pass on control messages, and wait.

    send, cancel, settle, room     messages between two ranks
    control                        small messages about groups and waits, between the frames
    wait, poll, wake, background   who moves the bytes: whoever waits, else a thread
    shared, common, alloc          memory, where ranks share it

The other way round a transport calls the engine: `matching.arriving` or `deliver` for a message,
`on_control` for a control message, `peer_left` and `peer_lost` for peers that are gone. The
engine's lock is held in all of these, and in the methods here unless they say otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
from torch import Tensor

from phalanx.core.posted import GroupBase, PostedSend, Wait, WorkBase
from phalanx.core.steps import SharedGroup, Source
from phalanx.wire.control import Answer, Ask, FailureNotice

Control: TypeAlias = "FailureNotice | Ask | Answer | None"
"""A control message about a group; None: this rank has closed it."""


class Transport(ABC):
    """Moves the bytes of one rank. Ranks are global ranks.

    single_thread  whether only the rank's own thread may wait: then nothing runs in the background
    """

    single_thread = False

    @abstractmethod
    def send(self, send: PostedSend) -> None:
        """Start to send a message; calls `send.complete()` when its memory is free again."""

    @abstractmethod
    def cancel(self, send: PostedSend) -> None:
        """A send was given up: its memory is not read from now on."""

    def settle(self, send: PostedSend) -> bool:
        """Whether a send whose time is over has gone all the same: then it is complete."""
        return False

    @abstractmethod
    def room(self, peer: int) -> None:
        """A receive from this peer was posted: there may be room now for what it sends."""

    @abstractmethod
    def control(self, peer: int, group: int, message: Control) -> None:
        """Send a control message about a group; to a peer that is gone, nothing happens."""

    @abstractmethod
    def has_left(self, peer: int) -> bool:
        """Whether a peer has closed in good order."""

    # Waiting --------------------------------------------------------------------------------

    @abstractmethod
    def wait(self, until: Wait) -> None:
        """Move bytes until that is over; past its deadline it fails. Lock not held."""

    @abstractmethod
    def poll(self, work: WorkBase) -> None:
        """Move the bytes that can be moved without waiting. Lock not held."""

    def glance(self, now: float) -> None:  # noqa: B027 - not all need to do a thing
        """A call begins that may end without waiting: see, now and then, what has arrived."""

    @abstractmethod
    def wake(self, work: WorkBase) -> None:
        """A work has ended: wake whoever waits for it."""

    def background(  # noqa: B027 - not all need to do a thing
        self, work: WorkBase, *, patience: float
    ) -> None:
        """See to it that this work moves on while nobody waits for it. Lock not held.

        patience   seconds for which it is left to whoever waits for it
        """

    def watch(self) -> None:  # noqa: B027 - not all need to do a thing
        """A step has begun that has to be polled: a thread that sleeps now has to look at it."""

    # Memory ---------------------------------------------------------------------------------

    def shared(self, group: GroupBase) -> SharedGroup | None:
        """Memory that this rank shares with members of a group, if there is any."""
        return None

    def alloc(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in memory that is sent without a copy. Lock not held."""
        return torch.empty(shape, dtype=dtype)

    def common(self, group: GroupBase) -> Source | None:
        """Where memory comes from that all members of a group have in common, if they have any.

        The same answer on every one of them.
        """
        return None
