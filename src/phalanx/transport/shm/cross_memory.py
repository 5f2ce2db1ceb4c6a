"""Cross-memory attach (CMA): reading the ordinary memory of another process of this host.

The kernel copies it, `process_vm_readv(2)`: one copy, by the reader; staging takes two.
A process may do so if it may trace the other one, `ptrace(2)`: processes of one user, and with Yama
(`/proc/sys/kernel/yama/ptrace_scope` is 1, as in Ubuntu), only if the other process has allowed it.
Ranks try it when they meet. If it does not work, tensors are staged.

The kernel looks up every page that it copies from. On some machines, virtual ones above all, that
takes longer than the second copy of staging, so it is timed, too (`reading_pays`).

    PHALANX_CMA=auto    used if the kernel allows it, and it is fast enough: the default
    PHALANX_CMA=allow   used if the kernel allows it; this process also says that any process of
                        its user may trace it
    PHALANX_CMA=off     not used

D. Goodell et al.: Cache-efficient, intranode, large-message MPI communication with MPICH2-Nemesis.
ICPP 2009. Open MPI and UCX call it CMA, too.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from time import perf_counter

from phalanx.errors import BackendUnavailableError

VARIABLE = "PHALANX_CMA"
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Range(ctypes.Structure):
    """A range of memory, as `struct iovec` of the kernel."""

    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessMemory:
    """The memory of a process of this host, to be read; of this one, too."""

    def __init__(self, process: int) -> None:
        self.process = process
        self._here, self._there = _Range(), _Range()
        self._ranges = ctypes.byref(self._here), 1, ctypes.byref(self._there), 1, 0

    def read(self, into: int, address: int, length: int) -> None:
        """Copy `length` bytes from `address` in that process to `into` in this one.

        Blocks for as long as the copy takes. Raises OSError: `ProcessLookupError` if the process
        is gone, `PermissionError`, or EFAULT where it has no such memory.
        """
        read, here, there = _process_vm_readv(), self._here, self._there
        while length > 0:
            here.start, there.start = into, address
            here.length = there.length = length
            count = read(self.process, *self._ranges)
            if count <= 0:
                number = ctypes.get_errno() if count < 0 else errno.EFAULT
                raise OSError(number, os.strerror(number))
            into, address, length = into + count, address + count, length - count


def cma_setting(environ: Mapping[str, str] = os.environ) -> str:
    """Return the value of `PHALANX_CMA`. Raises `BackendUnavailableError` for an unknown one."""
    setting = environ.get(VARIABLE, "") or "auto"
    if setting not in ("auto", "allow", "off"):
        raise BackendUnavailableError(f"{VARIABLE} must be auto, allow or off, not {setting!r}")
    return setting


def let_others_read() -> None:
    """Say that any process of this user may trace this one, which allows reading its memory.

    Nothing to do, and no error, where the kernel has no Yama.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)


TIMED = 1 << 20  # bytes
COPIES = 2  # by staging, where reading takes one


def reading_pays() -> bool:
    """Return whether reading this process is faster than the copies of staging.

    That holds for the whole host, as far as kernel and machine decide. The least of a few times
    counts: other processes that want the processor do not change it.
    """
    memory, copy = (ctypes.create_string_buffer(TIMED) for _ in range(2))
    there, here = ctypes.addressof(memory), ctypes.addressof(copy)
    ctypes.memset(there, 1, TIMED)  # else no pages are there
    try:
        read = _least_time(partial(ProcessMemory(os.getpid()).read, here, there, TIMED))
    except OSError:  # nothing can be read
        return False
    return read < COPIES * _least_time(partial(ctypes.memmove, here, there, TIMED))


def _least_time(do: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):  # the first one makes pages
        began = perf_counter()
        do()
        seconds.append(perf_counter() - began)
    return min(seconds)


@cache
def _process_vm_readv() -> ctypes._NamedFuncPointer:
    """Return the function of the C library. Raises OSError if it has none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
    function.restype = ctypes.c_ssize_t
    return function
