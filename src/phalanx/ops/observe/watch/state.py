"""The state of a job at one moment: published by ranks, shown by `phalanx watch`.

    RankState      one rank, by itself; its launcher adds whether it is stopped or dead
    JobState       all ranks, the slowest one, and the chain of waits

All are JSON (msgspec), never pickle. Readers of other processes' states bound them: `read_state`.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from phalanx.errors import plain
from phalanx.wire.control import learned

Status = Literal["starting", "running", "stopped", "dead", "unreachable", "ended"]
"""What the process of a rank is doing:

    starting  it has not published anything: no `phalanx.init()`, or no call since the watch began
    running   it runs
    stopped   it does not run: SIGSTOP, or a debugger holds it
    dead      it has ended otherwise than well; `reason` says how
    unreachable   nothing comes from its node; who watches says so, and not the rank
    ended     it has ended well: exit code 0, or 75 after a notice; or it has left the job
"""

MOST_VALUES = 16  # of the logged values
MOST_RANKS = 64  # of those for which a rank says it waits
MOST_BYTES = 1 << 20  # of one file of states


class RankState(msgspec.Struct, kw_only=True):
    """One rank at one moment. Numbers that are not known are 0, and texts ""."""

    rank: int  # in the job
    host: str = ""  # the name of its host
    pid: int = 0
    machine: str = ""  # the same for processes that see each other's numbers: of one host
    generation: int = 0  # number of earlier starts of the job's ranks
    time: float = 0.0  # of this state: seconds since 1970, by that host's clock
    status: Status = "running"  # of its process
    reason: str = ""  # of the status, in words, if it is stopped or dead
    step: int | None = None  # the step that has ended last, if the program logs it
    step_seconds: float = 0.0  # duration of that step
    operation: str = ""  # the call that is under way, such as "all_reduce"; "": it computes
    signature: str = ""  # arguments of the call, such as "float32 [32], sum"
    group: str = ""  # the ranks of its group, in words; "" for all ranks
    where: str = ""  # the line of the program, such as "train.py:57"
    sequence: int | None = None  # the number of the call in its group
    seconds_in: float = 0.0  # for which the call has been under way
    waits_for: list[int] = msgspec.field(default_factory=list)  # of the job; empty: it computes
    last_call: str = ""  # the call that ended last, in words
    # Shares of time (0..1) since the state before this one: in which calls were under way while it
    # computed, and blocked in calls. In the rest it computed, no more.
    communicating: float = 0.0
    waiting: float = 0.0
    sent: float = 0.0  # bytes a second, to all peers, since the state before
    received: float = 0.0
    memory: int = 0  # bytes of memory that the process has (resident)
    log: str = ""  # the last line that it has printed, without control characters
    # Logged ones, such as the loss. A number that JSON does not have is text: "nan", "inf", "-inf".
    values: dict[str, float | str] = msgspec.field(default_factory=dict)


class JobState(msgspec.Struct, kw_only=True):
    """A job at one moment."""

    name: str  # the script, or module, with its arguments
    world_size: int
    time: float  # of this state: seconds since 1970, by the watcher's clock
    ranks: list[RankState]  # all of them, in rank order; also those that have published nothing
    generation: int = 0  # number of earlier starts of all ranks
    # The rank that the others wait for: at the end of the chain, or the one that waits least; None
    # if all wait alike.
    slowest: int | None = None
    # While something stalls: its cause, and then the waits, one line each.
    chain: list[str] = msgspec.field(default_factory=list)
    ended: str = ""  # the end of the job, in words, in its last state; "" while it runs


def number(value: float) -> float | str:
    """Return a logged number in the form of `RankState.values`."""
    return value if math.isfinite(value) else str(float(value))


def read_state(data: bytes) -> JobState | None:
    """Return the state in another process's bytes, all of it `bounded`; None if it is none."""
    try:
        job = msgspec.json.decode(data, type=learned(JobState))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    job.ranks = [bounded(state) for state in job.ranks]
    job.name, job.ended = plain(job.name), plain(job.ended)
    return job


def bounded(state: RankState) -> RankState:
    """Return a published `state` with bounded lists, plain texts, real shares.

    It comes from another process, and may hold anything that its types allow.
    """
    for name, value in msgspec.structs.asdict(state).items():
        if isinstance(value, str):
            setattr(state, name, plain(value))
    state.waits_for = state.waits_for[:MOST_RANKS]
    state.values = {
        plain(name): plain(value) if isinstance(value, str) else value
        for name, value in list(state.values.items())[:MOST_VALUES]
    }
    state.communicating = min(max(state.communicating, 0.0), 1.0)
    state.waiting = min(max(state.waiting, 0.0), 1.0)
    return state
