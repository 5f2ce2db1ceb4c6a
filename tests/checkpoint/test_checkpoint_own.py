"""`own=`: what each rank saves for itself, such as where its data loader is."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from checkpoint_runs import MEMORY, small
from clusters import Tcp
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

import phalanx
from phalanx import (
    Backend,
    CheckpointDamagedError,
    UnsupportedObjectError,
    load_checkpoint,
    save_checkpoint,
)
from phalanx.checkpoint.manifest import VERSION, Commit, Manifest, decode, decode_manifest, encode


def place_of(rank: int) -> dict[str, Any]:
    """As `StatefulDataLoader.state_dict()` has it: numbers, None, and a generator's state."""
    generator = torch.Generator().manual_seed(rank).get_state()
    return {"yielded": 3 + rank, "workers": {0: None, 1: (rank,)}, "generator": generator}


def assert_place_of(rank: int, loaded: Any) -> None:
    expected = place_of(rank)
    assert torch.equal(loaded.pop("generator"), expected.pop("generator"))
    assert loaded == expected


def save_places(folder: Path, ranks: int, **options: Any) -> None:
    def run(backend: Backend) -> None:
        place = place_of(backend.rank)
        save_checkpoint(folder, model=small(), step=1, own=place, backend=backend, **options)

    phalanx.simulate(run, ranks)


def test_each_of_as_many_ranks_gets_its_own_value(folder: Path) -> None:
    save_places(folder, 3)
    for rank, loaded in enumerate(
        phalanx.simulate(lambda b: load_checkpoint(folder, backend=b), 3)
    ):
        assert loaded.world_size == 3
        assert_place_of(rank, loaded.own)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_number_of_ranks_gets_the_list_of_all(folder: Path, ranks: int) -> None:
    save_places(folder, 3)
    for loaded in phalanx.simulate(lambda b: load_checkpoint(folder, backend=b), ranks):
        assert loaded.world_size == len(loaded.own) == 3
        for rank, place in enumerate(loaded.own):
            assert_place_of(rank, place)


def test_a_rank_may_have_nothing_to_keep(folder: Path) -> None:
    """Such as the middle of a pipeline."""

    def run(backend: Backend) -> object:
        own = [7] if backend.rank == 1 else None
        save_checkpoint(folder, model=small(), step=1, own=own, backend=backend)
        return load_checkpoint(folder, backend=backend).own

    assert phalanx.simulate(run, 3) == [None, [7], None]
    assert load_checkpoint(folder).own == [None, [7], None]


def test_without_own_there_is_none_on_any_number_of_ranks_and_nothing_is_written(
    folder: Path,
) -> None:
    save_checkpoint(folder, model=small(), step=1)
    for ranks in (1, 2):
        for loaded in phalanx.simulate(lambda b: load_checkpoint(folder, backend=b), ranks):
            assert loaded.own is None
    assert '"own"' not in (folder / "000001-step-1" / "manifest.json").read_text()


def test_a_value_that_cannot_be_kept_names_rank_and_part_and_nothing_is_written(
    folder: Path,
) -> None:
    def run(backend: Backend) -> None:
        own = {"loader": [1, {2}] if backend.rank == 1 else [1]}
        with pytest.raises(UnsupportedObjectError, match=r"rank 1: own@1\.loader\.1 is a set"):
            save_checkpoint(folder, model=small(), step=1, own=own, backend=backend)

    phalanx.simulate(run, 2)
    assert list(folder.iterdir()) == []


def test_a_save_in_the_background_keeps_the_values_of_when_it_began(folder: Path) -> None:
    """The loader goes on meanwhile, and changes its tensors in place."""

    def run(backend: Backend) -> None:
        own = {"yielded": 1, "drawn": torch.full((1000,), backend.rank)}
        save = save_checkpoint(
            folder, model=small(), step=1, own=own, backend=backend, async_save=True
        )
        own["yielded"] = 2
        own["drawn"].fill_(-1)  # type: ignore[attr-defined]
        save.wait()
        loaded = load_checkpoint(folder, backend=backend).own
        assert loaded["yielded"] == 1
        assert loaded["drawn"].tolist() == [backend.rank] * 1000

    Tcp().run(run, 2)


def test_values_of_another_number_of_ranks_make_no_sense(folder: Path) -> None:
    save_places(folder, 2)
    path = folder / "000001-step-1"
    manifest = decode((path / "manifest.json").read_bytes(), Manifest, "")
    manifest.own.append(None)
    content = encode(manifest)
    commit = encode(Commit(VERSION, 1, len(content), xxh3_64_hexdigest(content)))
    with pytest.raises(
        CheckpointDamagedError, match="2 ranks, random states of 2, and own values of 3"
    ):
        decode_manifest(str(path), commit, content)


# ------------------------------------------------------------------------------
# An epoch that is interrupted: every sample is seen once


class Shuffled:
    """A rank's share of an epoch, shuffled; its state says where it is."""

    def __init__(self, rank: int, ranks: int, samples: int) -> None:
        self.state: dict[str, Any] = {"rank": rank, "ranks": ranks, "samples": samples, "seen": 0}
        self.state["seed"] = torch.Generator().manual_seed(7).get_state()

    def order(self) -> list[int]:
        generator = torch.Generator()
        generator.set_state(self.state["seed"])
        order = torch.randperm(self.state["samples"], generator=generator).tolist()
        return order[self.state["rank"] :: self.state["ranks"]]

    def take(self, count: int) -> list[int]:
        taken = self.order()[self.state["seen"] :][:count]
        self.state["seen"] += len(taken)
        return taken


@settings(max_examples=examples(60), deadline=None)
@given(
    samples=st.integers(0, 40),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    saved_at=st.integers(0, 12),
    lost=st.integers(0, 5),
)
def test_no_sample_of_an_interrupted_epoch_is_lost_or_seen_twice(
    samples: int, before: int, after: int, saved_at: int, lost: int
) -> None:
    """On as many ranks, each goes on with its own place; on others, they share out what is left.

    What was seen after the save (`lost`) is not in the model that is loaded, and is seen again.
    """
    with TemporaryDirectory(dir=MEMORY) as folder:

        def until_killed(backend: Backend) -> list[int]:
            loader = Shuffled(backend.rank, before, samples)
            seen = loader.take(saved_at)
            save_checkpoint(folder, model=small(), step=1, own=loader.state, backend=backend)
            loader.take(lost)
            return seen

        def again(backend: Backend) -> list[int]:
            loaded = load_checkpoint(folder, backend=backend)
            loader = Shuffled(0, 1, samples)
            if loaded.world_size == backend.world_size:
                loader.state = loaded.own
                return loader.take(samples)
            left = []
            for loader.state in loaded.own:
                left += loader.take(samples)
            return left[backend.rank :: backend.world_size]

        seen = phalanx.simulate(until_killed, before) + phalanx.simulate(again, after)
    assert Counter(chain.from_iterable(seen)) == Counter(range(samples))
