"""Another user of this host: a child process that is one, as only root can make it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@contextmanager
def other_user(do: Callable[[], object]) -> Iterator[tuple[int, str]]:
    """A child process of user `OTHER` that does this, and is then there until the end.

    Gives its number and what `do` has returned, as text.
    """
    said, over = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            result = do()  # whatever it holds is there until the end
            os.write(said[1], f"{result}\n".encode())
            os.close(over[1])
            os.read(over[0], 1)
        finally:
            os._exit(0)
    os.close(said[1])
    try:
        text = os.read(said[0], 4096).decode()
        assert text, "the child could not do it"
        yield child, text.strip()
    finally:
        for file in (said[0], *over):
            os.close(file)
        os.waitpid(child, 0)
