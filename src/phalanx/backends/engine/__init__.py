"""The engine under every backend: operations, their rounds, and where messages and receives meet.

operation   what one rank does in one collective or message: rounds and local steps
rounds      sends and receives that may happen together, bound to bytes
ticket      one round under way
mailbox     where messages and receives meet, whichever comes first
group       which ranks, in which order they do things, and whether they still can
failure     why a group is broken
engine      what a backend implements: transmit, reach, progress
"""

from phalanx.backends.engine.engine import Engine
from phalanx.backends.engine.failure import Failure
from phalanx.backends.engine.group import WORLD_ID, Group
from phalanx.backends.engine.operation import Combine, LocalStep, Operation
from phalanx.backends.engine.rounds import ReceiveBytes, Round, SendBytes, ring_barrier
from phalanx.backends.engine.ticket import PostedReceive, PostedSend, Ticket

__all__ = [
    "WORLD_ID",
    "Combine",
    "Engine",
    "Failure",
    "Group",
    "LocalStep",
    "Operation",
    "PostedReceive",
    "PostedSend",
    "ReceiveBytes",
    "Round",
    "SendBytes",
    "Ticket",
    "ring_barrier",
]
