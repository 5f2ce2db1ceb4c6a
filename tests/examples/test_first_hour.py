"""The scripts of docs/your-script.md: each has the numbers of the plain one, and the page is true.

The numbers are compared in double precision, on a seventh of the data: 142 sequences in batches of
64, 64 and 14, and 43 held-out ones, which no number of ranks has in equal parts.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from documents import PAGES, blocks
from first_hour import (
    step0_plain,
    step1_ddp,
    step2_micro_batches,
    step3_checkpoints,
    step4_fsdp,
)
from launchers import run_of_warm_ranks
from processes import run_job, run_python
from scripts_in_steps import (
    Held,
    History,
    assert_prints,
    assert_shown,
    difference,
    elements,
    epochs,
    held_by,
    picture_of_ranks,
    runs_of,
    same,
    words_of,
)

import phalanx

STEPS = (step0_plain, step1_ddp, step2_micro_batches, step3_checkpoints, step4_fsdp)
PAGE = PAGES["docs/your-script.md"]
RUNS = runs_of(PAGE)


@pytest.fixture(autouse=True)
def _little_data_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for step in STEPS:
        monkeypatch.setattr(
            step, "sequences", lambda count, seed, of=step.sequences: of(count // 7, seed)
        )
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def arguments(out: Path, **options: bool) -> Namespace:
    return Namespace(
        **{"epochs": 3, "out": out, "rows": 12, "resume": False, "bf16": False, **options}
    )


def train(step: ModuleType, ranks: int, out: Path, *, leave: int = 0, **options: bool) -> History:
    """Run a script's training on so many ranks; `leave`: until so many steps, one or two."""

    def run(backend: phalanx.Backend) -> History:
        args = arguments(out, **options)
        if step in (step1_ddp, step2_micro_batches):
            return step.train(args, backend)
        with phalanx.Notice(backend, signals=(), every=0) as notice:
            if leave and backend.rank == 0:
                notice.give()
            if leave == 1:
                notice.given()  # the second call is the one that knows
            return step.train(args, backend, notice)

    first, *others = phalanx.simulate(run, ranks)
    assert all(other == first for other in others)
    return first


# The numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "ranks"),
    [(step1_ddp, 1), (step1_ddp, 2), (step2_micro_batches, 1), (step2_micro_batches, 3)],
    ids=["DDP on 1", "DDP on 2", "micro-batches on 1", "micro-batches on 3"],
)
def test_the_losses_are_those_of_the_plain_script(
    step: ModuleType, ranks: int, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    plain = step0_plain.train(arguments(tmp_path / "plain"))
    assert same(train(step, ranks, tmp_path), plain)
    assert plain[-1][1] < plain[0][1]  # it learns
    model, other = (torch.load(out / "best.pt") for out in (tmp_path / "plain", tmp_path))
    assert {name: value.shape for name, value in model.items()} == {
        name: value.shape for name, value in other.items()
    }
    assert all(torch.allclose(other[name], value, atol=1e-8) for name, value in model.items())


@pytest.fixture(scope="module")
def unbroken() -> dict[str, History]:
    return {}


@pytest.mark.parametrize("second", [step3_checkpoints, step4_fsdp], ids=["DDP", "FSDP"])
def test_a_run_that_leaves_twice_has_the_losses_of_one_that_does_not(
    second: ModuleType, tmp_path: Path, unbroken: dict[str, History]
) -> None:
    """In the middle of an epoch, and at the end of one; from DDP to FSDP and back, too."""
    if not unbroken:
        unbroken["on one rank"] = train(step3_checkpoints, 1, tmp_path / "unbroken")
    out = tmp_path / "broken"
    history = train(step3_checkpoints, 2, out, leave=2)
    assert history == []
    assert phalanx.latest_checkpoint(out / "last").name == "000001-step-2"
    history += train(second, 3, out, resume=True, leave=1)
    assert len(history) == 1
    history += train(step3_checkpoints, 2, out, resume=True)
    assert same(history, unbroken["on one rank"])


def test_fsdp_has_the_losses_of_ddp_and_the_best_checkpoint_is_the_best(
    tmp_path: Path, unbroken: dict[str, History]
) -> None:
    if not unbroken:
        unbroken["on one rank"] = train(step3_checkpoints, 1, tmp_path / "unbroken")
    history = train(step4_fsdp, 2, tmp_path)
    assert same(history, unbroken["on one rank"])

    def held_out_loss(backend: phalanx.Backend) -> float:
        model = step4_fsdp.Classifier()
        phalanx.load_checkpoint(tmp_path / "best", model=model, backend=backend)
        return step4_fsdp.evaluate(model, step4_fsdp.sequences(301, seed=2), backend)

    (found,) = phalanx.simulate(held_out_loss, 1)
    assert found == pytest.approx(min(score for _, score in history), rel=1e-8)


def test_bfloat16_has_almost_the_losses_of_single_precision(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    single, half = (train(step4_fsdp, 2, tmp_path / str(bf16), bf16=bf16) for bf16 in (False, True))
    assert torch.allclose(torch.tensor(half), torch.tensor(single), rtol=0.05)
    assert not same(half, single)


# The page ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_a_diff_of_the_page_is_that_of_two_scripts(number: int) -> None:
    found = blocks("diff", PAGE)
    assert len(found) == 4
    assert found[number] == difference(STEPS[number], STEPS[number + 1])


@pytest.mark.parametrize("wrap", ["DDP", "FSDP"])
def test_a_picture_of_the_page_shows_what_ranks_have(wrap: str) -> None:
    def trained(backend: phalanx.Backend) -> Held:
        plain = step4_fsdp.Classifier()
        every = elements(plain.parameters())
        unit = {"unit": torch.nn.TransformerEncoderLayer} if wrap == "FSDP" else {}
        model = getattr(phalanx, wrap)(plain, backend, **unit)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1, 16, dtype=torch.int64)).sum().backward()
        optimizer.step()
        return held_by(model, optimizer, every, states=2)

    assert picture_of_ranks(trained, 2, marks=8) in blocks("text", PAGE)


@pytest.mark.parametrize("command", [each for each in RUNS if "step3" not in each])
def test_a_command_of_the_page_prints_what_it_says(command: str, tmp_path: Path) -> None:
    assert_prints(command, RUNS, tmp_path)


def test_sigterm_leaves_a_checkpoint_from_which_another_number_of_ranks_goes_on(
    tmp_path: Path,
) -> None:
    first, then = (command for command in RUNS if "step3" in command)
    ranks, words = words_of(first)
    started = subprocess.Popen(
        [*run_of_warm_ranks(), "-n", str(ranks), *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = ""
    assert started.stdout is not None
    with started.stdout as lines:
        for line in lines:
            output += line
            if "epoch 0" in line:
                started.send_signal(signal.SIGTERM)
    assert started.wait() == 75, output
    assert RUNS[first].splitlines()[-1] in output
    assert_shown(output.split("epoch 1")[0], RUNS[first])

    (inspect,) = re.findall(r"^phalanx (checkpoint inspect .*)", PAGE, flags=re.MULTILINE)
    shown = run_python(["-m", "phalanx", *inspect.split()], folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "embedding.weight" in shown.stdout

    ranks, words = words_of(then)
    done = run_job(words, ranks, folder=tmp_path)
    assert [each.returncode for each in done] == [0] * ranks, done
    assert_shown(done[0].stdout, RUNS[then])
    assert 0 < len(epochs(done[0].stdout)) < 8


if __name__ == "__main__":  # the page's diffs
    sys.stdout.write("\n".join(map(difference, STEPS, STEPS[1:])))
