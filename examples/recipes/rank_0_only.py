"""Work for rank 0 alone: it prepares something once; every rank gets the result, or the error.

phalanx run -n 2 examples/recipes/rank_0_only.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import phalanx


def on_rank_0(work: Callable[[], Any], backend: phalanx.Backend) -> Any:
    """Return on every rank what `work()` returns on rank 0. Its error is one on every rank."""
    result, failure = None, ""
    if backend.rank == 0:
        try:
            result = work()
        except Exception as error:  # the others wait for the result
            failure = f"rank 0: {error!r}"
    told = phalanx.broadcast_object(failure, backend)
    if told:
        raise RuntimeError(told)
    return phalanx.broadcast_object(result, backend)


def main(backend: phalanx.Backend) -> None:
    words = on_rank_0(lambda: sorted({"to", "be", "or", "not"}), backend)
    assert words == ["be", "not", "or", "to"]
    try:
        on_rank_0(Path("a/missing/file").read_text, backend)
    except RuntimeError as error:
        heard = phalanx.all_gather_object(str(error), backend)
    backend.print(f"{len(words)} words; {len(heard)} ranks raise {heard[-1]}")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
