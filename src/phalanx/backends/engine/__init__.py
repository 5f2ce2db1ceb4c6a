"""The engine under every backend: operations, their rounds, and where messages and receives meet.

operation   what one rank does in one collective or message, step by step
rounds      sends and receives that may happen together, bound to bytes
ticket      one round under way
mailbox     where messages and receives meet, whichever comes first
any_of      several operations, any of which a thread waits for
group       which ranks, in which order they do things, and whether they still can
foretold    what others say of groups that are not made here yet
agreement   whether they do the same things
trail       all that a group has been asked to do, as one word
overdue     whose fault it is when a deadline passes
failure     why a group is broken
wording     what that is called in errors
history     what this rank has done last
trace       the same in a file, if it is asked for
engine      what a backend implements: transmit, reach, progress
"""

from phalanx.backends.engine.any_of import AnyOf, Waited
from phalanx.backends.engine.caller import caller
from phalanx.backends.engine.engine import Engine
from phalanx.backends.engine.failure import Failure
from phalanx.backends.engine.group import WORLD_ID, Group
from phalanx.backends.engine.operation import Combine, Operation
from phalanx.backends.engine.rounds import ANY, ReceiveBytes, Round, SendBytes, Step, ring_barrier
from phalanx.backends.engine.ticket import PostedReceive, PostedSend, Ticket

__all__ = [
    "ANY",
    "WORLD_ID",
    "AnyOf",
    "Combine",
    "Engine",
    "Failure",
    "Group",
    "Operation",
    "PostedReceive",
    "PostedSend",
    "ReceiveBytes",
    "Round",
    "SendBytes",
    "Step",
    "Ticket",
    "Waited",
    "caller",
    "ring_barrier",
]
