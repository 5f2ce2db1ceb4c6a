"""The scripts of docs/your-script-vision.md: each has the numbers of the plain one, and the moving
average of its parameters; and the page is true.

The numbers are compared in double precision, on a third of the data: 113 images in batches of
32, 32, 32 and 17, and 100 held-out ones. The last batch is in unequal parts.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from documents import PAGES, blocks
from first_hour import vision0_plain, vision1_ddp, vision2_checkpoints, vision3_fsdp
from scripts_in_steps import (
    Held,
    History,
    assert_prints,
    difference,
    elements,
    held_by,
    picture_of_ranks,
    runs_of,
    same,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import phalanx

STEPS = (vision0_plain, vision1_ddp, vision2_checkpoints, vision3_fsdp)
PAGE = PAGES["docs/your-script-vision.md"]
RUNS = runs_of(PAGE)


@pytest.fixture(autouse=True)
def _little_data_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for step in STEPS:
        monkeypatch.setattr(
            step, "images", lambda count, seed, of=step.images: of(count // 3, seed)
        )
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def arguments(out: Path, **options: int) -> Namespace:
    out.mkdir(exist_ok=True)
    return Namespace(**{"epochs": 3, "out": out, "half": False, "resume": False, **options})


def train(step: ModuleType, ranks: int, out: Path, *, leave: int = 0, **options: int) -> History:
    """Run a script's training on so many ranks; `leave`: until so many steps, one or two."""
    args = arguments(out, **options)

    def run(backend: phalanx.Backend) -> History:
        if step is vision1_ddp:
            return step.train(args, backend)
        log = f"jsonl:{out}/scalars.jsonl"
        with (
            phalanx.Notice(backend, signals=(), every=0) as notice,
            phalanx.Scalars(backend, [log], every=1) as scalars,
        ):
            if leave and backend.rank == 0:
                notice.give()
            if leave == 1:
                notice.given()  # the second call is the one that knows
            return step.train(args, backend, notice, scalars)

    first, *others = phalanx.simulate(run, ranks)
    assert all(other == first for other in others)
    return first


def averages(out: Path) -> dict[str, Tensor]:
    """The model and the moving average of the last checkpoint, as one process loads them."""
    plain = vision0_plain.ResNet()
    both = nn.ModuleDict({"model": plain, "average": AveragedModel(plain)})
    phalanx.load_checkpoint(out / "last", model=both)
    return both.state_dict()


def are_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name], value, rtol=1e-7, atol=1e-9) for name, value in expected.items()
    )


# The numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_accuracy_and_moving_average_are_those_of_the_plain_script(
    ranks: int, tmp_path: Path
) -> None:
    """Its running statistics, too: batch norm has the joined batch, on any number of ranks."""
    alone, joined = tmp_path / "alone", tmp_path / "joined"
    expected = vision0_plain.train(arguments(alone))
    assert same(train(vision1_ddp, ranks, joined), expected)
    assert expected[-1][1] > expected[0][1]  # it learns
    assert are_close(torch.load(joined / "best.pt"), torch.load(alone / "best.pt"))


def test_without_sync_batch_norm_the_numbers_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = vision0_plain.train(arguments(tmp_path))
    monkeypatch.setattr(phalanx, "convert_sync_batchnorm", lambda model, backend: model)
    assert not same(train(vision1_ddp, 2, tmp_path), expected)


def test_a_run_that_leaves_twice_has_the_moving_average_of_one_that_does_not(
    tmp_path: Path,
) -> None:
    """In the middle of an epoch; from DDP to FSDP and back, and on another number of ranks."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    expected = train(vision2_checkpoints, 1, unbroken)
    assert train(vision2_checkpoints, 2, broken, leave=2) == []
    assert train(vision3_fsdp, 3, broken, resume=True, leave=1) == []
    assert phalanx.latest_checkpoint(broken / "last").name == "000002-step-3"
    assert same(train(vision2_checkpoints, 2, broken, resume=True), expected)
    assert are_close(averages(broken), averages(unbroken))
    records = [json.loads(line) for line in (broken / "scalars.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [*range(1, 13)]


def test_the_best_checkpoint_has_the_average_with_the_best_accuracy(tmp_path: Path) -> None:
    history = train(vision3_fsdp, 2, tmp_path, epochs=2)
    model = vision0_plain.ResNet()
    phalanx.load_checkpoint(tmp_path / "best", model=model)
    found = vision0_plain.evaluate(model, vision0_plain.images(301, seed=2), torch.device("cpu"))
    assert found == pytest.approx(max(score for _, score in history))


def test_float16_has_almost_the_losses_of_single_precision(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    single, half = (
        train(vision3_fsdp, 2, tmp_path / str(on), epochs=1, half=on) for on in (False, True)
    )
    assert half[0][0] == pytest.approx(single[0][0], rel=0.05)
    assert not same(half, single)


# The page ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(3))
def test_a_diff_of_the_page_is_that_of_two_scripts(number: int) -> None:
    found = blocks("diff", PAGE)
    assert len(found) == 3
    assert found[number] == difference(STEPS[number], STEPS[number + 1])


def test_the_picture_of_the_page_shows_what_ranks_have() -> None:
    def trained(backend: phalanx.Backend) -> Held:
        plain = phalanx.convert_sync_batchnorm(vision3_fsdp.ResNet(), backend)
        every, running = elements(plain.parameters()), elements(plain.buffers())
        model = phalanx.FSDP(plain, backend, unit=vision3_fsdp.Block)
        average = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(vision3_fsdp.images(8, seed=1).tensors[0]).sum().backward()
        optimizer.step()
        return {
            **held_by(model, optimizer, every, states=1),
            "average": (elements(average.parameters()), every),
            "running statistics": (elements(model.buffers()), running),
        }

    assert picture_of_ranks(trained, 3, marks=6) in blocks("text", PAGE)


@pytest.mark.parametrize("command", RUNS)
def test_a_command_of_the_page_prints_what_it_says(command: str, tmp_path: Path) -> None:
    assert_prints(command, RUNS, tmp_path)


if __name__ == "__main__":  # the page's diffs
    sys.stdout.write("\n".join(map(difference, STEPS, STEPS[1:])))
