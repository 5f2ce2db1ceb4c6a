"""`spawn` in notebooks, which a real kernel runs, and at IPython's prompt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

for needed in ("ipykernel", "nbclient", "cloudpickle", "tqdm"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: make test-clients")

import nbformat  # noqa: E402
from jupyter_client.manager import KernelManager  # noqa: E402
from nbclient import NotebookClient  # noqa: E402
from nbformat.v4 import new_code_cell, new_notebook  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
EXERCISES = sorted((EXAMPLE.parent / "exercises").glob("*.ipynb"))
PATIENCE = 120  # seconds for a cell

DEFINITIONS = """
import os, time
import torch, phalanx
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x)

class Trained:
    def __init__(self, weights, losses):
        self.weights, self.losses = weights, losses

class Diverged(Exception):
    pass

__file__ = "train.py"  # as some tools set, and some people
"""

TRAIN = """
def train(backend):
    torch.manual_seed(0)
    ddp = phalanx.DDP(Net(), backend)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.arange(12.0).reshape(4, 3)[backend.rank :: backend.world_size] / 12
    losses = []
    for step in range(3):
        loss = ddp(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print("step", step)
        backend.barrier()
    return Trained(ddp.module.state_dict(), losses)

print("before")
one, two = phalanx.spawn(train, 2)
print("after")
assert type(one) is type(two) is Trained
assert all(torch.equal(one.weights[name], two.weights[name]) for name in one.weights)

torch.manual_seed(0)
plain = Net()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    plain(torch.arange(12.0).reshape(4, 3) / 12).square().mean().backward()
    optimizer.step()
torch.testing.assert_close(one.weights, dict(plain.state_dict()))
"""

BARS = """
from tqdm import tqdm
from rich.progress import track

def bars(backend):
    if backend.rank == 0:
        for step in tqdm(range(3), desc="tqdm", mininterval=0):
            print("in step", step)
    backend.barrier()
    if backend.rank == 1:
        for step in track(range(3), description="rich"):
            pass

phalanx.spawn(bars, 2);
"""

FAIL = """
def diverge(backend):
    print("here is", backend.rank)
    backend.barrier()
    if backend.rank == 1:
        raise Diverged("the loss is nan")
    backend.barrier()

phalanx.spawn(diverge, 2)
"""

# Also where the cell uses `await`: there the kernel has a SIGINT handler of its own, which waits.
WAIT = """
def wait(backend):
    print("waits as process", os.getpid())
    time.sleep(600)

try:
    phalanx.spawn(wait, 2)
finally:
    print("spawn has ended")
"""
WAIT_IN_LOOP = "import asyncio; await asyncio.sleep(0)" + WAIT

AFTER = "print(phalanx.spawn(lambda backend: backend.rank + 10, 2))"

CELLS = MappingProxyType(
    {
        "definitions": DEFINITIONS,
        "train": TRAIN,
        "bars": BARS,
        "fail": FAIL,
        "interrupted": WAIT,
        "after": AFTER,
        "interrupted in a loop": WAIT_IN_LOOP,
        "after that": AFTER,
    }
)


class Client(NotebookClient):
    """Runs a notebook, and interrupts the kernel when a cell says that both ranks wait."""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        output = super().process_message(msg, cell, cell_index)
        wait = msg["msg_type"] == "stream" and text(cell).count("waits as process") == 2
        if wait and "interrupted" not in cell.metadata:
            cell.metadata["interrupted"] = True
            self.km.interrupt_kernel()
        return output


def run(notebook: Any, cwd: Path) -> Any:
    client = Client(
        notebook,
        timeout=PATIENCE,
        kernel_name="python3",
        allow_errors=True,
        kernel_manager_class=KernelManager,
        resources={"metadata": {"path": str(cwd)}},
    )
    return client.execute()


def text(cell: Any, name: str = "stdout") -> str:
    shown = [out.text for out in cell.outputs if out.output_type == "stream" and out.name == name]
    return "".join(shown)


def errors(cell: Any) -> list[str]:
    return [out.ename for out in cell.outputs if out.output_type == "error"]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The cells of a notebook that has run in one kernel, by name."""
    notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS.values()])
    run(notebook, tmp_path_factory.mktemp("notebook"))
    return dict(zip(CELLS, notebook.cells, strict=True))


def test_a_model_of_the_notebook_trains_as_it_does_in_one_process(cells: dict[str, Any]) -> None:
    assert errors(cells["definitions"]) == errors(cells["train"]) == []


def test_what_ranks_print_is_in_the_cell_in_order_behind_their_rank(cells: dict[str, Any]) -> None:
    first, *lines, last = text(cells["train"]).splitlines()
    assert (first, last) == ("before", "after")
    for step in range(3):
        both = lines[2 * step : 2 * step + 2]
        assert sorted(both) == [f"[rank 0] step {step}", f"[rank 1] step {step}"]
    assert len(lines) == 6


def test_progress_bars_are_in_the_cell(cells: dict[str, Any]) -> None:
    cell = cells["bars"]
    assert errors(cell) == []
    assert [line for line in text(cell).splitlines() if "in step" in line] == [
        f"[rank 0] in step {step}" for step in range(3)
    ]
    moves = [move for move in re.split("[\r\n]", text(cell, "stderr")) if move.strip()]
    assert [move for move in moves if not move.startswith("[rank 0] tqdm:")] == []
    assert "100%|" in moves[-1]
    assert text(cell, "stderr").count("\n") == 1, "one bar, which is written over"
    assert re.search(r"^\[rank 1\] rich .*100%", text(cell), flags=re.MULTILINE)


def test_a_failed_ranks_traceback_is_shown_after_all_output(cells: dict[str, Any]) -> None:
    cell = cells["fail"]
    assert sorted(text(cell).splitlines()) == ["[rank 0] here is 0", "[rank 1] here is 1"]
    error = cell.outputs[-1]
    assert (error.ename, error.evalue) == ("Diverged", "the loss is nan")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    call, _, last = shown.partition("Rank 1:\n")
    assert call.endswith("phalanx.spawn(diverge, 2)\n\n")
    assert last.splitlines()[-2].strip() == 'raise Diverged("the loss is nan")'
    assert last.splitlines()[-1].endswith("Diverged: the loss is nan")
    assert "spawn.py" not in shown, "frames of the package say nothing here"


@pytest.mark.parametrize(
    ("interrupted", "after"), [("interrupted", "after"), ("interrupted in a loop", "after that")]
)
def test_an_interrupt_ends_the_ranks_and_the_next_cell_works(
    cells: dict[str, Any], interrupted: str, after: str
) -> None:
    cell = cells[interrupted]
    assert errors(cell) == ["KeyboardInterrupt"]
    assert text(cell).endswith("\nspawn has ended\n")
    pids = [int(pid) for pid in re.findall(r"as process (\d+)", text(cell))]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert text(cells[after]) == "[10, 11]\n"


def test_the_example_runs_and_keeps_no_output(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    code = [cell for cell in run(notebook, tmp_path).cells if cell.cell_type == "code"]
    assert [name for cell in code for name in errors(cell)] == []
    lines = text(code[-2]).splitlines()
    assert sorted(line[:17] for line in lines[2:]) == ["[rank 0] step 200", "[rank 1] step 200"]
    right = re.fullmatch(r"(\d+\.\d)% right\n", text(code[-1]))
    assert right is not None
    assert float(right[1]) > 90


@pytest.mark.parametrize("path", EXERCISES, ids=[path.stem for path in EXERCISES])
def test_an_exercise_prints_in_a_kernel_what_is_stored_in_it(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = [text(cell) for cell in notebook.cells if cell.cell_type == "code"]
    code = [cell for cell in run(notebook, tmp_path).cells if cell.cell_type == "code"]
    assert [name for cell in code for name in errors(cell)] == []
    assert [text(cell) for cell in code] == stored


PROMPT = """
import os, phalanx
def double(backend):
    os.write(1, f"rank {backend.rank} is here.".encode())  # in one piece
    return 2 * backend.rank

print("results", phalanx.spawn(double, 2))
"""


def test_a_function_typed_at_the_prompt_of_ipython(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        input=PROMPT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
    )
    assert "results [0, 2]" in ended.stdout
    assert all(f"rank {rank} is here." in ended.stdout for rank in range(2))
    assert "Traceback" not in ended.stdout + ended.stderr
