"""Telling the failure that came first from those that follow from it.

When rank 2 fails, ranks 0, 1 and 3 lose their peer and fail too. All endings of a run are put in
this order, and the first is the root cause:

    1. errors of a rank's own, and deaths that nobody ordered, by time
    2. lost peers, and whatever was raised while handling one; ranks told to stop; by time
"""

from __future__ import annotations

import signal

from phalanx.errors import PeerLostError, RankStopped

__all__ = ["describe_exit", "follows_from_another"]


def follows_from_another(error: BaseException) -> bool:
    """Return whether another rank's failure led to `error`: a lost peer is in its chain."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, (PeerLostError, RankStopped)):
            return True
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def describe_exit(code: int) -> str:
    """Return how a process ended in words: `exit code 3`, or `killed by signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"
