"""docs/choose.md: its formulas and tables are those of scripts/memory.py, and its picture is true.

The formulas are measured in tests/benchmarks/test_memory_by_strategy.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from documents import PAGES, ROOT, blocks
from torch import nn

import phalanx
from phalanx import Backend

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "benchmarks"))

import pages
from language_model.model import GPT
from memory import (
    FORMULAS,
    TIMES_FEWER,
    Held,
    Job,
    crossings,
    gpt2,
    links,
    llama,
    rows,
    sending,
    sizes,
)

PAGE = PAGES["docs/choose.md"]


def table(head: str) -> list[str]:
    """The lines of the table that has this text in its head, without the head."""
    (found,) = re.findall(rf"^\|[^\n]*{re.escape(head)}[^\n]*\n\|[-:|]+\n((?:\|.*\n)+)", PAGE, re.M)
    return [str(line) for line in found.splitlines()]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# Memory -----------------------------------------------------------------------------------------


def value(formula: str, job: Job) -> float:
    """The value of a cell such as `k n/p`, or `2 n, and c or 3 m`."""
    text = formula.replace("c or 3 m", "max(c, 3 m)").replace(", and", " +")
    python = re.sub(r"(?<=[\w)]) (?=[a-z])", "*", text)
    letters = {**job._asdict(), "c": max(job.c, job.m)}
    return float(eval(python, {"max": max}, letters))


JOBS = [
    Job(n=1000.0, m=50.0, u=30.0, r=11.0, p=8, k=3, g=4, c=200.0, d=200.0),
    Job(n=700.0, m=50.0, u=70.0, r=13.0, p=2, k=1, g=1, c=10.0, d=10.0),
]


@pytest.mark.parametrize("job", JOBS, ids=["large buckets", "small buckets"])
def test_the_formulas_of_the_page_are_those_that_are_measured(job: Job) -> None:
    found = {}
    for line in table("for a moment"):
        name, *formulas = cells(line)
        found[name] = Held(*(value(each, job) for each in formulas))
    assert list(found) == list(FORMULAS)
    for name, formula in FORMULAS.items():
        assert found[name] == pytest.approx(formula(job)), name


def test_the_worked_examples_are_computed() -> None:
    assert table("124M (GPT-2 small)") == rows()
    assert table("n | u | r | m |") == sizes()


def test_the_models_of_the_examples_have_as_many_parameters_as_these() -> None:
    assert (gpt2().n / 4, llama().n / 4) == (124_439_808, 6_738_415_616)


def test_an_embedding_with_a_tied_head_stays_in_no_unit() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.words.weight
            self.body = nn.Linear(3, 3, bias=False)

    def groups(backend: Backend) -> dict[str, int]:
        model = phalanx.FSDP(Tied(), backend, unit=(nn.Linear, nn.Embedding))
        return {group.name: len(group.flats) for group in model._runtime.groups}

    for found in phalanx.simulate(groups, 2):
        assert found[""] == 1


# The picture ------------------------------------------------------------------------------------


def picture(title: str) -> list[tuple[str, str]]:
    """Gradients and state of the lines below a title of the picture, as letters."""
    (text,) = (block for block in blocks("text", PAGE) if "each rank" in block)
    lines = text.split(f" {title} ", 1)[1].split("\n\n")[0].splitlines()[1:]
    return [(parts[2], parts[3]) for parts in (re.split(r" {2,}", line.strip()) for line in lines)]


def parts_of_a_step(backend: Backend, strategy: str | phalanx.ShardingStrategy) -> tuple[str, str]:
    """The parts of which this rank has gradients, and state, after a step: four parameters."""
    plain = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        plain.weight.copy_(torch.arange(4.0))
    if strategy in ("DDP", "ShardedOptimizer"):
        model: nn.Module = phalanx.DDP(
            nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(4)]), backend
        )
        make = torch.optim.AdamW
        optimizer: torch.optim.Optimizer = (
            make(model.parameters()) if strategy == "DDP" else phalanx.ShardedOptimizer(make, model)
        )
        loss = sum(p.sum() for p in model.parameters())
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        each = list(model.parameters())
        has = [p.grad is not None for p in each], [p in optimizer.state for p in each]
        return letters(has[0]), letters(has[1])
    model = phalanx.FSDP(plain, backend, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    (weight,) = model.parameters()
    mine = set(weight.detach().flatten().tolist())
    assert weight.grad is not None
    assert weight.grad.numel() == optimizer.state[weight]["exp_avg"].numel() == len(mine)
    shown = letters([float(n) in mine for n in range(4)])
    return shown, shown


def letters(has: list[bool]) -> str:
    return " ".join(letter if yes else "." for letter, yes in zip("abcd", has, strict=True))


@pytest.mark.parametrize(
    ("title", "strategy", "ranks"),
    [
        ("DDP, no_shard", "no_shard", [0]),
        ("DDP, no_shard", "DDP", [0]),
        ("ShardedOptimizer", "ShardedOptimizer", [0, 1]),
        ("shard_grad_op", "shard_grad_op", [0, 1]),
        ("full_shard", "full_shard", [0, 1]),
        ("hybrid, 2 and 2", phalanx.ShardingStrategy.hybrid(2), [0, 1]),
    ],
)
def test_ranks_have_the_parts_of_the_picture(
    title: str, strategy: str | phalanx.ShardingStrategy, ranks: list[int]
) -> None:
    found = phalanx.simulate(lambda backend: parts_of_a_step(backend, strategy), 4)
    assert picture(title) == [found[rank] for rank in ranks]
    if title.startswith("hybrid"):
        assert found[2:] == found[:2]


# The network ------------------------------------------------------------------------------------


def test_the_tables_of_links_and_crossings_are_computed() -> None:
    assert table("link, Gbit/s") == links()
    assert table("gradients | Gbit/s |") == crossings()


def test_compressors_send_so_many_times_fewer_bytes_on_the_page_about_them() -> None:
    for name, times in TIMES_FEWER.items():
        if name != "all":
            page = PAGES["docs/compression.md"]
            (row,) = re.findall(rf"^\| {re.escape(name[:-1])}`.*$", page, re.M)
            assert float(cells(row)[3]) == times, name


def test_the_formula_gives_the_measured_steps_over_a_slow_link() -> None:
    """Those of docs/numbers.md, whose columns are links with their measured rates."""
    with torch.device("meta"):
        model = GPT(context=64, layers=4, width=512, heads=8)
    n = sum(p.nbytes for p in model.parameters())
    text = " ".join(PAGE.split())
    assert f"{n / 1e6:.1f} MB of gradients" in text
    _, part, _ = pages.split(PAGES["docs/numbers.md"], "crossings")
    head, _, *rows = [cells(line) for line in part.splitlines() if line.startswith("|")]
    slow = next(number for number, title in enumerate(head) if title.endswith("Mbit/s, ms"))
    rate = float(head[slow].split()[0].replace(",", "")) / 1000
    measured = {row[0]: float(row[slow].replace(",", "")) / 1000 for row in rows}
    for name, times in (("dense", 1.0), ("half", 2.0)):
        seconds = sending(n, 2, rate, times)
        assert 0.95 * seconds < measured[name] < seconds + 2 * measured["no communication"], name


# What goes with what ----------------------------------------------------------------------------


def test_the_examples_of_combinations_are_cells_of_the_table() -> None:
    combinations = PAGES["docs/combinations.md"]
    head = next(cells(line) for line in combinations.splitlines() if line.startswith("| | DDP"))
    for line in table("feature | wrapper | cell |"):
        feature, wrapper, cell, _ = cells(line)
        (row,) = re.findall(rf"^\| {re.escape(feature)} \|.*$", combinations, re.M)
        assert cells(row)[head.index(wrapper)] == cell, feature
