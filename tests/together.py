"""One test on several clusters at the same time: what it only waits for passes once, not ten times.

A test asks for it with the marker `together`. Each cluster gets a call of the test function of its
own, in a thread of its own, so that nothing but fixtures is shared between them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusters import Cluster


class Together:
    """Stands for all these clusters as the argument of a test."""

    def __init__(self, clusters: Sequence[Cluster]) -> None:
        self.clusters = clusters

    def run_each(self, test: Callable[[Cluster], object]) -> None:
        """Call the test with every cluster; raises the first error, which says whose it is."""
        failures: list[BaseException] = []

        def run(cluster: Cluster) -> None:
            try:
                test(cluster)
            except BaseException as error:  # pytest's own are no exceptions
                note(error, f"on the cluster {cluster.name}")
                failures.append(error)

        threads = [
            threading.Thread(target=run, args=(cluster,), name=f"the test on {cluster.name}")
            for cluster in self.clusters
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # `Cluster.run` loses its patience by itself
        if failures:
            for error in failures[1:]:
                note(failures[0], f"another failed, too: {error!r} {_notes(error)}")
            raise failures[0]


def note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(note)


def _notes(error: BaseException) -> str:
    return "; ".join(getattr(error, "__notes__", ()))
