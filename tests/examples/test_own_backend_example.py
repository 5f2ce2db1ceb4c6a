"""The example of a backend of one's own: short, and all that is above a transport works over it."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import own_backend
import pytest
import torch
from torch import nn

import phalanx
from phalanx import Backend, CollectiveTimeoutError, DesyncError, MisuseError, PeerLostError
from phalanx.core.transport import Transport

T = TypeVar("T")
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_backend.py"


def run(fn: Callable[[Backend], T], size: int = 3) -> list[T]:
    queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(size)]

    def rank(number: int) -> T:
        with own_backend.backend_of(number, queues) as backend:
            return fn(backend)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def test_it_is_at_most_50_lines_long_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 50
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == "[0, 1, 2] [0, 1, 2] [0, 1, 2]\n"
    assert "own_backend" in sys.modules


def test_contributing_names_the_methods_that_a_transport_has_to_have() -> None:
    text = (EXAMPLE.parents[1] / "CONTRIBUTING.md").read_text()
    (outline,) = re.findall(r"class PigeonTransport.*?\nengine = ", text, re.DOTALL)
    named = set(re.findall(r"    def (\w+)\(self", outline)) - {"__init__"}
    assert named == Transport.__abstractmethods__


@pytest.mark.parametrize("algorithm", ["ring", "direct", "tree", "star"])
def test_collectives_messages_and_groups_work_over_it(algorithm: str) -> None:
    def use(backend: Backend) -> None:
        total = phalanx.all_reduce(torch.ones(1000), backend, algorithm=algorithm)
        assert total.tolist() == [3.0] * 1000
        pending = phalanx.async_all_gather(torch.tensor([backend.rank]), backend)
        right, left = (backend.rank + 1) % 3, (backend.rank - 1) % 3
        into = bytearray(1)
        backend.sendrecv(bytes([backend.rank]), right, into, left)
        assert into[0] == left
        assert pending.wait().tolist() == [0, 1, 2]
        if backend.rank != 1:
            pair = backend.subgroup([0, 2])
            assert phalanx.all_reduce(torch.ones(1), pair).item() == 2

    run(use)


def test_ddp_trains_over_it() -> None:
    torch.manual_seed(0)
    inputs, plain = torch.randn(6, 4), nn.Linear(4, 2)

    def gradient(backend: Backend) -> torch.Tensor:
        model = nn.Linear(4, 2)
        model.load_state_dict(plain.state_dict())
        wrapped = phalanx.DDP(model, backend)
        wrapped(inputs[2 * backend.rank :][:2]).square().mean().backward()
        return model.weight.grad

    plain(inputs).square().mean().backward()
    for found in run(gradient):
        torch.testing.assert_close(found, plain.weight.grad)


def test_errors_are_those_of_every_backend() -> None:
    def disagree(backend: Backend) -> None:
        with pytest.raises(
            DesyncError, match=r"called .*float32 \[3\].*\n.*called .*float32 \[4\]"
        ):
            phalanx.all_reduce(torch.ones(4 if backend.rank == 1 else 3), backend)

    def wait(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="rank 1"):
                backend.recv(bytearray(1), 1, timeout=0.05)
        backend.barrier()

    def leave(backend: Backend) -> None:
        pair = backend.subgroup([0, 1]) if backend.rank < 2 else backend
        if backend.rank == 0:
            with pytest.raises(PeerLostError, match="rank 1 left"):
                phalanx.all_reduce(torch.ones(1), pair)
        backend.close()
        with pytest.raises(MisuseError, match="closed"):
            backend.barrier()

    for each in (disagree, wait, leave):
        run(each)
