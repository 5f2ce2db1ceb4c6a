"""Whether two processes of this host can share memory: made, written, read, answered, removed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from types import MappingProxyType

from phalanx.launch.doctor.finding import Checks, Finding, fail, info, ok

__all__ = ["SHARING", "share_memory"]

SIZE = 16 << 20
_OTHER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
    assert memory[:5] == memory[-5:] == b"hello", memory[:5]
    memory[:5] = b"world"
"""
"""What the second process does."""


def share_memory(folder: Path) -> Finding:
    """Return whether a second process sees what this one writes to memory in `folder`."""
    hint = f"is {folder} full, or mounted noexec or read-only? Ranks of one host can use tcp"
    path = ""
    try:
        descriptor, path = tempfile.mkstemp(prefix="phalanx-doctor-", dir=folder)
        with os.fdopen(descriptor, "r+b") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, SIZE)  # a full disk is an error, no SIGBUS
            else:
                os.ftruncate(file.fileno(), SIZE)
            with mmap.mmap(file.fileno(), SIZE) as memory:
                data = b"hello" + bytes(SIZE - 10) + b"hello"
                begin = perf_counter()
                memory[:] = data
                seconds = perf_counter() - begin
                words = [sys.executable, "-I", "-S", "-c", _OTHER, path]
                other = subprocess.run(words, capture_output=True, timeout=30, check=False)
                if other.returncode != 0:
                    said = other.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                    return fail(f"a second process cannot read {folder}: {said}", hint)
                if memory[:5] != b"world":
                    return fail(f"a second process's answer in {folder} is not seen", hint)
    except (OSError, subprocess.SubprocessError) as error:
        return fail(f"{folder}: {error}", hint)
    finally:
        if path:
            Path(path).unlink(missing_ok=True)
    return ok(
        f"two processes share memory in {folder}; {SIZE / seconds / 1e9:.1f} GB/s to new pages"
    )


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return info("there is no /dev/shm here: ranks of one host talk over TCP")
    return share_memory(folder)


SHARING: Checks = MappingProxyType({"shared memory": _shared_memory})
