"""Conversions that are killed at calls that change something, and within files as they grow.

    python killed_conversions.py FOLDER TIMES

Each conversion is a fork of this process. It kills itself (SIGKILL) at a call, or is killed by the
system (SIGXFSZ) in the middle of a write, torch's own included, when a file reaches a size. What it
leaves is the whole result or none, and the next attempt ends well. Files that cannot grow further,
as on a full disk, are an error that names the file, after which nothing is left. Each of these is
done TIMES times, or at every call if there are fewer.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "checkpoint"))

import torch
from checkpoint_runs import assert_same, state_of
from conversions import save, silent, trained
from file_operations import Operation, in_a_fork, killing, recorded, watched
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from phalanx import CheckpointIOError, CheckpointNotFoundError, load_checkpoint
from phalanx.checkpoint.group import CheckpointGroup
from phalanx.checkpoint.stored import open_checkpoint
from phalanx.ops.interop.dcp_export import export_dcp
from phalanx.ops.interop.dcp_import import import_dcp
from phalanx.ops.interop.hugging_face import export_hugging_face

EXPECTED = trained()
Act = Callable[[Path], None]
FAILED_AS_IT_SHOULD = 3
CHANGES = frozenset({"write", "fsync", "mkdir", "rename", "unlink", "rmdir"})


def export_hf(folder: Path) -> None:
    runs, out = folder / "runs", folder / "out"
    export_hugging_face(open_checkpoint(runs), out, shard_size=400, begin=silent)


def check_hf(folder: Path) -> None:
    expected = EXPECTED[0].state_dict()
    del expected["head.weight"]
    found = {}
    for path in (folder / "out").glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert len(list((folder / "out").iterdir())) == 4  # three files, and the index


def export_torch(folder: Path) -> None:
    export_dcp(open_checkpoint(folder / "runs"), folder / "out", begin=silent)


def check_torch(folder: Path) -> None:
    model, optimizer = trained(seed=5, steps=0)
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optimizer": states[1]}
    dcp.load(state, checkpoint_id=folder / "out", no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=states[0], optim_state_dict=state["optimizer"]
    )
    assert_same(state_of(model, optimizer), state_of(*EXPECTED))


def import_torch(folder: Path) -> None:
    import_dcp(folder / "x.dcp", folder / "out", trust_pickle=True, begin=silent)


def check_import(folder: Path) -> None:
    model, optimizer = trained(seed=5, steps=1)
    load_checkpoint(folder / "out", model=model, optimizer=optimizer)
    assert_same(state_of(model, optimizer), state_of(*EXPECTED))


CONVERSIONS: Mapping[str, tuple[Act, Act]] = MappingProxyType(
    {
        "export hf": (export_hf, check_hf),
        "export dcp": (export_torch, check_torch),
        "import": (import_torch, check_import),
    }
)


def is_change(operation: Operation) -> bool:
    return operation.name in CHANGES or operation.creates


def changes(convert: Act, folder: Path) -> int:
    """How many calls it makes that change something."""
    with recorded(str(folder)) as operations:
        convert(folder)
    return sum(map(is_change, operations))


def killed_at_call(convert: Act, folder: Path, number: int) -> int:
    def act() -> None:
        with watched(str(folder), killing(number, str(folder), is_change)):
            convert(folder)

    return in_a_fork(act)


def killed_at_size(convert: Act, folder: Path, size: int) -> int:
    def act() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        convert(folder)

    return in_a_fork(act)


def without_room(convert: Act, folder: Path, size: int) -> int:
    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        group = CheckpointGroup(None, "convert", None)
        try:
            group.on_all(lambda: convert(folder))
        except CheckpointIOError as error:
            named = any(str(folder / name) in str(error) for name in (".out.unfinished", "out"))
            os._exit(FAILED_AS_IT_SHOULD if named else 1)

    return in_a_fork(act)


def is_there(folder: Path) -> bool:
    """Whether there is a result, be it whole or not."""
    out = folder / "out"
    try:
        load_checkpoint(out)
    except CheckpointNotFoundError:
        return any(out.glob("*.safetensors")) or any(out.glob("*.distcp"))
    return True


def spread(count: int, times: int) -> list[int]:
    """So many numbers below `count`, or all; the last three are among them."""
    return sorted({*range(0, count, -(-count // times)), *range(max(0, count - 3), count)})


def check(name: str, folder: Path, times: int) -> str:
    """Interrupt one conversion so often; in words, where."""
    convert, check_result = CONVERSIONS[name]
    calls = changes(convert, folder)
    check_result(folder)
    largest = max(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
    shutil.rmtree(folder / "out")
    found = {"whole": 0, "none": 0}

    def look(status: int, killed_by: int) -> None:
        """Look at what it left, and try again if that is nothing."""
        assert status == killed_by, f"{name} ended with status {status}"
        if is_there(folder):
            found["whole"] += 1
        else:
            found["none"] += 1
            convert(folder)
        check_result(folder)
        left = {path.name for path in folder.iterdir()} - {"runs", "x.dcp", "out"}
        assert not left, left
        shutil.rmtree(folder / "out")

    for number in spread(calls, times):
        look(killed_at_call(convert, folder, number), signal.SIGKILL)
    assert found["none"] > 0
    assert found["whole"] > 0
    sizes = [largest * number // times for number in range(times)]
    for size in sizes:
        look(killed_at_size(convert, folder, size), signal.SIGXFSZ)
        status = without_room(convert, folder, size)
        assert status == FAILED_AS_IT_SHOULD << 8, f"{name} ended with status {status}"
        assert not is_there(folder)
        assert not (folder / ".out.unfinished").exists()
        shutil.rmtree(folder / "out", ignore_errors=True)
    numbers = spread(calls, times)
    return f"{name}: killed at {len(numbers)} calls of {calls}, and {len(sizes)} sizes"


def check_all(folder: Path, times: int) -> list[str]:
    """Interrupt every conversion; for each, where."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("phalanx").setLevel(logging.CRITICAL)
    save(folder / "runs", 2)
    export_torch(folder)
    (folder / "out").rename(folder / "x.dcp")
    return [check(name, folder, times) for name in CONVERSIONS]


if __name__ == "__main__":
    print(*check_all(Path(sys.argv[1]), int(sys.argv[2])), sep="\n")
