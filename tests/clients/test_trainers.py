"""Trainers: their programs over Phalanx come to what they come to over Gloo."""

from __future__ import annotations

import re
import signal
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from programs import LAUNCHERS, finish, needs, results, start
from trainers import TRAINERS, Trainer

INSTEAD = {"PHALANX_INSTEAD_OF_GLOO": "1"}
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
EACH = [pytest.param(each, id=each.name, marks=needs(each.package)) for each in TRAINERS]
LIGHTNING = [each for each in EACH if each.id.startswith("Lightning")]

each_trainer = pytest.mark.parametrize("trainer", EACH)


@cache
def over_gloo(trainer: Trainer, ranks: int) -> list[str]:
    with TemporaryDirectory() as folder:
        said = results(start("torchrun", trainer.program, folder, ranks=ranks))
    assert f"gloo {ranks}" in said[0] + said[-1]
    return said


def check_equal(said: list[str], trainer: Trainer) -> None:
    assert "phalanx 2" in said[0] + said[-1]
    assert [line.replace("phalanx", "gloo") for line in said] == over_gloo(trainer, 2)


@each_trainer
def test_a_program_that_takes_gloo_comes_to_the_same_with_phalanx_instead(
    trainer: Trainer, tmp_path: Path
) -> None:
    check_equal(results(start("phalanx run", trainer.program, tmp_path, **INSTEAD)), trainer)


@each_trainer
def test_a_program_that_names_phalanx_comes_to_the_same(trainer: Trainer, tmp_path: Path) -> None:
    check_equal(results(start("torchrun", trainer.program, tmp_path, "phalanx")), trainer)


@pytest.mark.parametrize("trainer", LIGHTNING)
def test_lightning_may_start_the_ranks_itself(trainer: Trainer, tmp_path: Path) -> None:
    said = start("the program itself", trainer.program, tmp_path, "phalanx")
    check_equal(results(said), trainer)


@each_trainer
def test_three_ranks_come_to_the_same_but_for_rounding(trainer: Trainer, tmp_path: Path) -> None:
    """Gloo adds in another order."""
    said = results(start("phalanx run", trainer.program, tmp_path, "phalanx", ranks=3))
    expected = over_gloo(trainer, 3)
    words = [NUMBER.sub("a number", line).replace("phalanx", "gloo") for line in said]
    assert words == [NUMBER.sub("a number", line) for line in expected]
    found, wanted = (
        [float(number) for line in lines for number in NUMBER.findall(line)]
        for lines in (said, expected)
    )
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@each_trainer
def test_what_is_refused_is_refused_with_this_error(trainer: Trainer, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(f"{trainer.refused.imports}\n{trainer.refused.expression}\n")
    command = [*LAUNCHERS["phalanx run"](2), str(script)]
    ((code, _, err),) = finish([command], {})
    assert code == 1
    assert trainer.refused.error in err


@needs("lightning")
@needs("mpi4py")
@pytest.mark.parametrize("launcher", ["phalanx run", "the program itself"])
def test_lightning_asks_an_mpi4py_without_a_library_only_where_no_launcher_is(
    launcher: str, tmp_path: Path
) -> None:
    script = tmp_path / "mpi.py"
    script.write_text(
        "from lightning.fabric import Fabric\nFabric(accelerator='cpu', devices=2)\nprint('made')\n"
    )
    command = [*LAUNCHERS[launcher](2), str(script)]
    ((code, out, err),) = finish([command], {"MPI4PY_LIBMPI": "no-such-library.so"})
    if launcher == "phalanx run":
        assert (code, out.count("made")) == (0, 2), err
    else:
        assert code == 1
        assert "RuntimeError: cannot load MPI library" in err


@needs("transformers")
def test_a_rank_killed_in_a_trainers_step_is_named_in_the_log_of_the_survivor(
    tmp_path: Path,
) -> None:
    """Without a launcher, which would end the survivor, too."""
    program = [sys.executable, str(Path(__file__).with_name("killed_program.py")), str(tmp_path)]
    commands = [["env", f"RANK={rank}", f"LOCAL_RANK={rank}", *program] for rank in range(2)]
    (code, _, err), (code_of_killed, *_) = finish(
        commands, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    )
    assert code_of_killed == -signal.SIGKILL
    assert code == 1
    assert "rank 1 was lost" in err
