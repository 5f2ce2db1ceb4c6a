"""Ordinary memory of another process: what can be read of it, and what is said if it cannot."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from itertools import accumulate, chain

import pytest
import torch
from clusters import SharedMemory, needs_reading
from shm_peers import local_peers, make_control

import phalanx
from phalanx import Backend, BackendUnavailableError
from phalanx.core.shared_group import UnreadableError
from phalanx.transport.shm import cross_memory
from phalanx.transport.shm.cross_memory import ProcessMemory, cma_setting, reading_pays
from phalanx.transport.shm.directory import PROOF, READS

HERE = ProcessMemory(os.getpid())


pytestmark = needs_reading


def test_what_lies_in_a_process_is_copied_byte_by_byte() -> None:
    given = torch.arange(100_003, dtype=torch.uint8)
    for first, count in ((0, given.numel()), (1, 4096), (4095, 2), (100_002, 1), (7, 0)):
        found = torch.full((count + 1,), 0xA5, dtype=torch.uint8)
        HERE.read(found.data_ptr(), given.data_ptr() + first, count)
        assert torch.equal(found[:count], given[first : first + count])
        assert found[count] == 0xA5


def test_memory_that_ends_too_early_is_an_error_that_says_so() -> None:
    """What comes before its end is copied; no error is lost for that."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    into = torch.empty(2 * mmap.PAGESIZE, dtype=torch.uint8)
    with pytest.raises(OSError, match="Bad address") as caught:
        HERE.read(into.data_ptr(), start, 2 * mmap.PAGESIZE)
    assert caught.value.errno == errno.EFAULT


def test_a_process_that_has_ended_is_told_apart() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    into = ctypes.c_uint64()
    with pytest.raises(ProcessLookupError):
        ProcessMemory(ended.pid).read(ctypes.addressof(into), 4096, 8)


@pytest.mark.parametrize(("given", "meant"), [("", "auto"), ("off", "off"), ("allow", "allow")])
def test_the_environment_says_whether_it_is_used(given: str, meant: str) -> None:
    assert cma_setting({"PHALANX_CMA": given}) == meant


def test_another_setting_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailableError, match="PHALANX_CMA must be auto, allow or off, no"):
        cma_setting({"PHALANX_CMA": "1"})


def test_a_peer_whose_proof_is_not_there_is_not_read() -> None:
    """As if its process number meant another process here, in a namespace of its own."""
    with local_peers(2) as domain:
        peer = domain[0].local_peers[1]
        assert peer.is_readable()
        there = domain[1].directory
        there.words[PROOF + 8] = there.words[PROOF] ^ 1
        there.words[PROOF - 1] += 8 * 8  # where it says that its directory is
        assert not peer.is_readable()
        domain[0].try_reading()
        assert domain[0].directory.words[READS] == 0


@pytest.mark.parametrize(("seconds", "pays"), [(1.9, True), (2.1, False)])
def test_reading_pays_if_it_takes_less_time_than_two_copies(
    seconds: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    durations = [seconds] * 3 + [1.0] * 3
    clock = accumulate(chain.from_iterable((0.0, each) for each in durations))
    monkeypatch.setattr(cross_memory, "perf_counter", lambda: next(clock))
    assert reading_pays() == pays


def test_nobody_shows_ordinary_memory_unless_all_can_read_it() -> None:
    with local_peers(3) as domain:
        for one in domain[:2]:
            one.try_reading()
        assert not any(make_control(domain, rank, 1).is_readable for rank in range(3))
        domain[2].try_reading()
        assert all(make_control(domain, rank, 2).is_readable for rank in range(3))


def test_a_right_that_is_taken_back_is_an_error_that_names_both_ranks_and_what_to_do() -> None:
    with local_peers(2) as domain:
        control = make_control(domain, 0)
        peer = domain[0].local_peers[1]
        error = UnreadableError(peer.rank, PermissionError(errno.EPERM, "Operation not permitted"))
        with pytest.raises(BackendUnavailableError) as caught:
            control.after(error)
    for part in ("rank 0", "rank 1", "Operation not permitted", "PHALANX_CMA=off"):
        assert part in str(caught.value)


def test_one_that_has_gone_or_given_up_is_waited_for_and_so_named() -> None:
    with local_peers(2) as domain:
        control, other = make_control(domain, 0), make_control(domain, 1)
        peer = domain[0].local_peers[1]
        gone = UnreadableError(peer.rank, ProcessLookupError(errno.ESRCH, "No such process"))
        assert control.after(gone).waits_for() == [1]
        unmapped = UnreadableError(peer.rank, OSError(errno.EFAULT, "Bad address"))
        assert control.find_peer(1) is not None
        other.give_up()
        control.words[0] = other.words[0] = 1  # the flags: one epoch
        other.give_up()
        assert control.after(unmapped).waits_for() == [1]


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_ranks_that_may_not_read_stage_and_get_the_same_bits(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(backend: Backend) -> torch.Tensor:
        generator = torch.Generator().manual_seed(backend.rank)
        return phalanx.all_reduce(torch.randn(500_001, generator=generator), backend)

    expected = SharedMemory().run(run, 3)[0]
    monkeypatch.setenv("PHALANX_CMA", setting)
    for result in SharedMemory().run(run, 3):
        assert torch.equal(result, expected)
