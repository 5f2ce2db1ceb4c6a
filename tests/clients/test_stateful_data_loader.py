"""torchdata's StatefulDataLoader, whose place is in the checkpoint for each rank."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from programs import HERE, LAUNCHERS, finish, needs, results, start

import phalanx

SAMPLES = 48  # 12 steps of 2 samples on 2 ranks


@needs("torchdata")
@pytest.mark.parametrize("killed_after", [5, 7])
def test_an_epoch_that_is_killed_goes_on_without_a_sample_lost_or_seen_twice(
    tmp_path: Path, killed_after: int
) -> None:
    """2 workers a rank read ahead; what was taken after the last checkpoint is taken again."""
    program = "data_loader_program.py"
    words = [str(HERE / program), str(tmp_path), str(SAMPLES)]
    killed = [*LAUNCHERS["phalanx run"](2), *words, str(killed_after)]
    code, out, _ = finish([killed], {})[0]
    assert code != 0
    last = phalanx.load_checkpoint(tmp_path)
    assert (last.step, last.world_size) == (killed_after - killed_after % 3, 2)
    assert len(last.own) == 2
    out += "\n" + start("phalanx run", program, *words[1:])
    seen = [int(number) for line in results(out) for number in line.split()]
    assert Counter(seen) == Counter(range(SAMPLES))


@needs("torchdata")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_goes_on_in_it_on_another_number_of_ranks(workers: int) -> None:
    """By the sampler's state; the loader's own is refused."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def batches(
        backend: phalanx.Backend, stop: int | None, state: Any = None, of_loader: Any = None
    ) -> tuple[list[list[int]], Any, Any]:
        sampler = phalanx.BatchSampler(23, backend, batch_size=5)
        loader = StatefulDataLoader(
            list(range(23)), batch_sampler=sampler, collate_fn=list, num_workers=workers
        )
        if state is not None:
            sampler.load_state_dict(state)
        if of_loader is not None:
            loader.load_state_dict(of_loader)
        taken, states = [], (None, None)
        for batch in islice(sampler.track(loader), stop):
            taken.append(batch)
            states = sampler.state_dict(), loader.state_dict()
        return taken, *states

    [(taken, state, of_loader)] = phalanx.simulate(lambda b: batches(b, 2), 1)
    parts = [rest for rest, *_ in phalanx.simulate(lambda b: batches(b, None, state), 2)]
    rest = [one + other for one, other in zip(*parts, strict=True)]
    [(whole, *_)] = phalanx.simulate(lambda b: batches(b, None), 1)
    assert taken + rest == whole
    with pytest.raises(phalanx.MisuseError, match="and not the loader's"):
        phalanx.simulate(lambda b: batches(b, None, state, of_loader), 1)
