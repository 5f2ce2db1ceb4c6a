"""What a job looks like at one moment: what ranks publish, and what `phalanx watch` shows.

    RankState      one rank, as it says itself; its launcher adds whether it is stopped or dead
    JobState       all ranks, who is slowest, and who waits for whom

All are JSON (msgspec), never pickle. Who reads what others have written bounds it: `read_state`.
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

MOST_VALUES = 16  # of what the program logs
MOST_RANKS = 64  # of those for which a rank says it waits
MOST_BYTES = 1 << 20  # of one file of states


class RankState(msgspec.Struct, kw_only=True):
    """One rank at one moment. Numbers that are not known are 0, and texts "".

    rank, host, pid     who it is: its rank in the job, the name of its host, its process
    machine             the same for processes that see each other's numbers: of one host
    generation          how often the ranks of the job have been started again before
    time                when this was taken: seconds since 1970, by that host's clock
    status, reason      what its process does; the reason in words, where it is stopped or dead
    step                the number of the step that has ended last, if the program logs it; or None
    step_seconds        how long that step took
    operation           the call that is under way, such as "all_reduce"; "" for none: it computes
    signature           what the call is about, such as "float32 [32], sum"
    group               the ranks of its group, in words; "" for all ranks
    where               the line of the program, such as "train.py:57"
    sequence            the number of the call in its group; None where there is no call
    seconds_in          seconds for which the call has been under way
    waits_for           ranks (of the job) for which the call waits now; empty where it computes
    last_call           the call that ended last, in words
    waiting             share of time (0..1) blocked in calls, since the state before this one
    communicating       share of time (0..1) in which calls were under way and it was not blocked:
                        it computed meanwhile. 1 - waiting - communicating: it computed, no more
    sent, received      bytes a second, to and from all peers, since the state before
    memory              bytes of memory that the process has (resident)
    log                 the last line that it has printed, without control characters
    values              what the program logs, such as the loss, by name. A number that JSON does
                        not have is text: "nan", "inf", "-inf"
    """

    rank: int
    host: str = ""
    pid: int = 0
    machine: str = ""
    generation: int = 0
    time: float = 0.0
    status: Status = "running"
    reason: str = ""
    step: int | None = None
    step_seconds: float = 0.0
    operation: str = ""
    signature: str = ""
    group: str = ""
    where: str = ""
    sequence: int | None = None
    seconds_in: float = 0.0
    waits_for: list[int] = msgspec.field(default_factory=list)
    last_call: str = ""
    communicating: float = 0.0
    waiting: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    memory: int = 0
    log: str = ""
    values: dict[str, float | str] = msgspec.field(default_factory=dict)


class JobState(msgspec.Struct, kw_only=True):
    """A job at one moment.

    name        the script, or module, with its arguments
    world_size  how many ranks there are
    time        when this was taken: seconds since 1970, by the watcher's clock
    ranks       all of them, in rank order; also those that have published nothing
    generation  how often all ranks have been started again
    slowest     the rank that the others wait for: at the end of the chain, or the one that waits
                least; None where all wait alike
    chain       while something stalls: who waits for whom, one line each; else empty
    ended       how the job has ended, in words; "" while it runs. It is the last state then
    """

    name: str
    world_size: int
    time: float
    ranks: list[RankState]
    generation: int = 0
    slowest: int | None = None
    chain: list[str] = msgspec.field(default_factory=list)
    ended: str = ""


_TEXTS = tuple(
    "host machine reason operation signature group where last_call log".split()  # noqa: SIM905
)


def number(value: float) -> float | str:
    """Return a logged number as it stands in `RankState.values`."""
    return value if math.isfinite(value) else str(float(value))


def read_state(data: bytes) -> JobState | None:
    """Return the state that somebody has written, with all of it `bounded`; None if it is none."""
    try:
        job = msgspec.json.decode(data, type=learned(JobState))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    job.ranks = [bounded(state) for state in job.ranks]
    job.name, job.ended = plain(job.name), plain(job.ended)
    return job


def bounded(state: RankState) -> RankState:
    """Return `state`, as somebody has published it, with bounded lists, plain texts, real shares.

    What is read is one rank's word: it may hold anything that its types allow.
    """
    for name in _TEXTS:
        setattr(state, name, plain(getattr(state, name)))
    state.waits_for = state.waits_for[:MOST_RANKS]
    state.values = {
        plain(name): plain(value) if isinstance(value, str) else value
        for name, value in list(state.values.items())[:MOST_VALUES]
    }
    state.communicating = min(max(state.communicating, 0.0), 1.0)
    state.waiting = min(max(state.waiting, 0.0), 1.0)
    return state
