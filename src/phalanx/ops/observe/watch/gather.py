"""The states of a job, one after the other, put together from its ranks' publications.

    for state in follow(find_job()):     twice a second; the last one has the job's end
        ...

While this is read, the ranks publish; nothing is asked of them otherwise.

The slowest rank: the others wait for it, and it waits little itself. While something stalls, it is
the end of the chain of waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from phalanx.errors import MisuseError
from phalanx.ops.observe.watch import nodes
from phalanx.ops.observe.watch.folder import GONE, PERIOD, VARIABLE, WatchFolder, private_folders
from phalanx.ops.observe.watch.state import JobState, RankState
from phalanx.wire.control import Answer, chain_of_waits

TROUBLE = ("stopped", "dead", "unreachable")  # states of a rank that others wait for in vain
STALL = 2.0  # seconds in one call after which the chain of waits is shown
_FIRST = 2.0  # seconds that ranks have to notice a watcher
_APART = 0.1  # by how much of the time one rank waits less than another, to be called slowest
_MEMORY = 5.0  # seconds over which shares of time are averaged, to find the slowest rank


def follow(
    read: nodes.Read, *, period: float = PERIOD, sleep: Callable[[float], object] = time.sleep
) -> Iterator[JobState]:
    """Yield states of a job, one each `period` seconds; the last one has `ended`.

    Blocks in `sleep` between them. Stop reading at any time: then the ranks stop publishing.
    """
    gatherer = Gatherer()
    state: JobState | None = None
    for latest in iter(read, None):
        state = gatherer.complete(latest)
        yield state
        if state.ended:
            return
        sleep(period)
    if state is not None:
        state.ended, state.time = GONE, time.time()
        yield state


def snapshot(read: nodes.Read) -> JobState | None:
    """Return one state, when the ranks have published, or a moment later. None: it is gone."""
    began, state = time.monotonic(), None
    known = began  # when something was known of all nodes
    for state in follow(read):
        now, starting = time.monotonic(), [r for r in state.ranks if r.status == "starting"]
        if now < began + nodes.FIRST and any(not rank.pid for rank in starting):
            known = now
        elif now - known > (_FIRST if starting else 2 * PERIOD):  # launchers publish in a `PERIOD`
            break
    return state


# ------------------------------------------------------------------------------
# Facts about all ranks together.


class Gatherer:
    """Adds to each state of a job the facts that follow from all ranks, and from states before."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # The time of each rank's latest state, and when it came.
        self._published: dict[int, tuple[float | None, float]] = {}
        self._waiting: dict[int, float] = {}  # share of time, of late
        self._last = now()

    def complete(self, job: JobState) -> JobState:
        """Return `job` with all of its ranks, the slowest, and the chain of waits."""
        job.time = time.time()
        known = {state.rank: state for state in job.ranks}
        unknown = partial(RankState, status="starting", reason="nothing is known of it here")
        job.ranks = [known.get(rank) or unknown(rank=rank) for rank in range(job.world_size)]
        now = self._now()
        weight = min((now - self._last) / _MEMORY, 1.0)
        self._last = now
        for state in job.ranks:
            state.waits_for = [rank for rank in state.waits_for if 0 <= rank < job.world_size]
            if job.world_size > 1:
                self._note_silence(state, now)
            if state.status == "running":
                before = self._waiting.get(state.rank, state.waiting)
                self._waiting[state.rank] = before + weight * (state.waiting - before)
            else:
                self._waiting.pop(state.rank, None)
        chain = [] if job.ended else stalled(job.ranks)
        job.chain = describe_chain(job.ranks, chain)
        job.slowest = chain[-1] if chain else self._waits_least()
        return job

    def _waits_least(self) -> int | None:
        shares = self._waiting
        if len(shares) < 2 or max(shares.values()) - min(shares.values()) < _APART:
            return None
        return min(shares, key=lambda rank: shares[rank])

    def _note_silence(self, state: RankState, now: float) -> None:
        """Note of a rank that runs, but publishes no more, for how long."""
        if state.status != "running":
            self._published.pop(state.rank, None)
            return
        published, came = self._published.get(state.rank, (None, now))
        if published != state.time:
            self._published[state.rank] = state.time, now
        elif now - came > nodes.SILENCE and not state.reason:
            state.reason = f"it has published nothing for {now - came:.0f} s"


def stalled(ranks: Sequence[RankState]) -> list[int]:
    """Return the chain of waits, if one rank has waited for `STALL` seconds, or for a dead one.

    The first rank waits, in the end for the last one. If that one stands in the chain before, too,
    they wait for each other.
    """
    states = {state.rank: state for state in ranks}
    given_up = {state.rank for state in ranks if state.status in TROUBLE}
    stuck = [
        state
        for state in ranks
        if state.status == "running" and state.waits_for
        if state.seconds_in >= STALL or not given_up.isdisjoint(state.waits_for)
    ]
    if not stuck:
        return []
    first = max(stuck, key=lambda state: (state.seconds_in, -state.rank))
    answers: dict[int, Answer | None] = {
        # A stopped rank waits for nobody, in spite of its last report.
        state.rank: Answer(state.waits_for if state.status == "running" else [], "")
        for state in ranks
    }
    chain, ends = chain_of_waits([first.rank], answers)
    if not ends:
        while len(chain) < 2 or chain[-1] not in chain[:-1]:
            chain.append(states[chain[-1]].waits_for[0])
    return chain


def describe_chain(ranks: Sequence[RankState], chain: Sequence[int]) -> list[str]:
    """Return the lines that tell a chain of waits, the cause first; none for an empty one.

    rank 2 is stopped: process 4711 is stopped (SIGSTOP, or a debugger holds it)
    rank 0 has waited 12.3 s in all_reduce #41 (float32 [32], sum) at train.py:57
    -> for rank 1, which has waited 12.0 s in recv #3 at train.py:80
    -> for rank 2
    ranks 3 to 63 wait, too
    """
    if not chain:
        return []
    states = {state.rank: state for state in ranks}
    circle = chain[chain.index(chain[-1]) : -1]
    cause = f"rank {chain[-1]} {_doing(states[chain[-1]])}"
    if circle:
        cause = f"{ranks_in_words(sorted(circle))} wait for each other"
    lines = [cause, f"rank {chain[0]} {_doing(states[chain[0]])}"]
    for rank in chain[1:-1]:
        lines.append(f"-> for rank {rank}, which {_doing(states[rank])}")
    lines.append(f"-> for rank {chain[-1]}")
    others = [state.rank for state in ranks if state.waits_for and state.rank not in chain]
    if others:
        waits = "waits" if len(others) == 1 else "wait"
        lines.append(f"{ranks_in_words(others)} {waits}, too")
    return lines


def _doing(state: RankState) -> str:
    """Return a rank's action, as the rest of a sentence about it."""
    if state.status == "starting":
        return f"has published nothing: {state.reason or 'it is in no call of Phalanx'}"
    if state.status != "running":
        return f"is {state.status}: {state.reason}" if state.reason else f"is {state.status}"
    if state.waits_for:
        return f"has waited {state.seconds_in:.1f} s in {call_in_words(state)}"
    last = f"; its last was {state.last_call}" if state.last_call else ""
    silent = f"; {state.reason}" if state.reason else ""
    doing = f"is in {call_in_words(state)}" if state.operation else "computes: it is in no call"
    return f"{doing}{last}{silent}"


def call_in_words(state: RankState) -> str:
    """Return the call of a rank, as errors have it: `all_reduce #41 (float32 [32]) at a.py:57`."""
    number = "" if state.sequence is None else f" #{state.sequence}"
    details = f" ({state.signature})" if state.signature else ""
    group = f" in the group of {state.group}" if state.group else ""
    where = f" at {state.where}" if state.where else ""
    return f"{state.operation}{number}{details}{group}{where}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 3 and 5`, `ranks 1 to 4, 7`."""
    runs = groupby(enumerate(ranks), key=lambda placed: placed[1] - placed[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    words = [f"{span[0]} to {span[-1]}" if span[1:] else str(span[0]) for span in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


# ------------------------------------------------------------------------------
# Which job.


def find_job(*places: str) -> nodes.Read:
    """Return a reader of a job's states: of that at these places, or this user's only one here.

    places   a folder, as PHALANX_WATCH named it for the job, or one of those that `jobs` lists; or
    the addresses, host:port, of all of its nodes, if the token is that of the job

    `MisuseError` if there is none; if there are several, it lists them.
    """
    places = tuple(place for place in places if place)
    endpoints = [nodes.as_address(place) for place in places]
    if places and None not in endpoints:
        token = nodes.token_for_watchers(places[0])
        remotes = [
            nodes.RemoteNode(str(each), each, token) for each in endpoints if each is not None
        ]
        for remote in remotes:
            remote.take()
        return nodes.all_of(remotes)
    if len(places) > 1:
        raise MisuseError(
            f"phalanx watch {' '.join(places)}: it is one folder, or a list of host:port"
        )
    if places:
        path = Path(places[0])
        if not path.is_dir():
            raise MisuseError(
                f"there is no folder {path}: give the one that {VARIABLE} named when the job was "
                "started, or nothing, for a job of phalanx run or phalanx.spawn on this host"
            )
        folder = WatchFolder(path)
    else:
        folder = choose(jobs())
    return nodes.WholeJob(folder)


def choose(found: Sequence[tuple[WatchFolder, JobState]]) -> WatchFolder:
    """Return the one folder of a running job, or of the last ended one. `MisuseError`: see above.

    The end of a job is known for a while, if somebody watched it.
    """
    running = [(folder, state) for folder, state in found if not state.ended]
    if len(running) == 1:
        return running[0][0]
    if found and not running:
        return max(found, key=lambda job: job[1].time)[0]
    if not running:
        raise MisuseError(
            "no job of yours runs on this host under phalanx run or phalanx.spawn. For another "
            f"launcher set {VARIABLE}=FOLDER when you start it, and type: phalanx watch FOLDER"
        )
    lines = [
        f"  phalanx watch {folder.path}   # {state.name} on {state.world_size}"
        for folder, state in running
    ]
    raise MisuseError("\n".join([f"{len(running)} jobs run on this host; choose one:", *lines]))


def jobs() -> list[tuple[WatchFolder, JobState]]:
    """Return this user's jobs of Phalanx's launchers on this host, and their folders.

    `time` of a state is that of the last publication.
    """
    found = []
    for folder in private_folders():
        state = folder.read()
        if state is not None:
            if not state.ended and folder.is_gone():
                state.ended = GONE
            found.append((folder, state))
    return found
