"""The ranks' standard output and errors on their way to the launcher's: one named pipe for each.

    rank 3 --- stdout --->  folder/.../3/stdout  ---.
    rank 4 --- stdout --->  folder/.../4/stdout  ---+--- one thread ---> "[rank 4] loss 3.1"

Torch's agent wants files, and follows them; a pipe has a name like a file, takes no room on the
disk however long the job runs, and says at once when there is something. A launcher whose own
output is not taken holds up the ranks, as any pipe does.
"""

from __future__ import annotations

import os
import selectors
import threading

from phalanx.launch.output import RankLines

__all__ = ["RankPipes"]

_PIECE, _MOST = 1 << 16, 1 << 20


class RankPipes:
    """Reads the pipes of all ranks in a thread, until `close()`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe()
        self._selector.register(self._reader, selectors.EVENT_READ)
        self._closing = False
        self._drained = threading.Event()
        self._thread = threading.Thread(target=self._read, name="rank output", daemon=True)
        self._thread.start()

    def add(self, path: str, rank: int, lines: RankLines) -> None:
        """Make a pipe at `path`, and pass what comes out of it to `lines`. `OSError`: cannot."""
        os.mkfifo(path, 0o600)
        # Open for writing, too: so it never ends, whoever opens and closes it at the other end.
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._selector.register(pipe, selectors.EVENT_READ, (rank, lines))

    def drain(self) -> None:
        """Pass on all that has been written, and forget the pipes: their writers are gone."""
        self._drained.clear()
        os.write(self._writer, b"!")
        self._drained.wait()

    def close(self) -> None:
        """Drain the pipes, and read no more."""
        self._closing = True
        self.drain()
        self._thread.join()
        self._selector.close()
        os.close(self._reader)
        os.close(self._writer)

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._take(key)
                    continue
                os.read(self._reader, 1)
                self._take_the_rest()
                # Read before the other thread goes on: it may close, or wait anew.
                closing = self._closing
                self._drained.set()
                if closing:
                    return
                break  # the others of these keys are closed

    def _take(self, key: selectors.SelectorKey) -> bool:
        """Pass on one piece of what is in a pipe; return whether there was one."""
        try:
            data = os.read(key.fd, _PIECE)
        except BlockingIOError:
            return False
        rank, lines = key.data
        lines.write(rank, data)
        return True

    def _take_the_rest(self) -> None:
        pipes = [key for key in self._selector.get_map().values() if key.data is not None]
        for key in pipes:
            # No more than a pipe holds: something that a rank has left behind may write on.
            for _ in range(_MOST // _PIECE):
                if not self._take(key):
                    break
            self._selector.unregister(key.fd)
            os.close(key.fd)
        for _, lines in {id(key.data[1]): key.data for key in pipes}.values():
            lines.finish()
