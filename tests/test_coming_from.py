"""docs/coming-from.md: names are there on both sides, links lead somewhere, diffs train."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from documents import PAGES, ROOT, blocks
from ports import unused_port
from processes import run_job, run_python
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import phalanx
from phalanx import Backend
from phalanx.cli.app import app
from phalanx.parallel.joined_step import JoinedStep

DOCS = ROOT / "docs"
PAGE = PAGES["docs/coming-from.md"]
DDP_DIFF, FSDP2_DIFF, ACCELERATE_DIFF = blocks("diff", PAGE)
TERMS = set(
    """
    DistributedSampler gradient_clipping clip_grad_norm_ world_size all_reduce torchrun
    init_process_group no_sync SyncBatchNorm ZeroRedundancyOptimizer Join DeviceMesh DTensor
    gradient_accumulation GradScaler barrier find_unused_parameters state_dict LOCAL_RANK
""".split()  # noqa: SIM905 - as in the table; `gradient_` stands for a word and a space
)


# Tables -----------------------------------------------------------------------------------------


def tables() -> Iterator[tuple[list[str], list[list[str]]]]:
    """The head and the rows of each table of the page."""
    for block in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                          for line in block.splitlines())  # fmt: skip
        yield head, rows


def spans(*columns: str) -> list[str]:
    """The code in the columns of these names, each once."""
    found: dict[str, None] = {}
    for head, rows in tables():
        for row in rows:
            assert len(row) == len(head), row
            for name, cell in zip(head, row, strict=True):
                if name in columns:
                    found |= dict.fromkeys(re.findall(r"`([^`]+)`", cell))
    return [*found]


# Names of Phalanx -------------------------------------------------------------------------------


class ANewModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


@cache
def of_phalanx() -> dict[str, Any]:
    """What names of the page's Phalanx columns stand for: real objects of a world of one."""
    (alone,) = phalanx.SimulatedBackend.create_group(1)
    public = {name: getattr(phalanx, name) for name in phalanx.__all__}
    model = phalanx.DDP(ANewModel(), alone)
    return {
        **public,
        "phalanx": phalanx,
        "torch": torch,
        "backend": alone,
        "model": model,
        "fsdp": phalanx.FSDP(ANewModel(), alone),
        "sampler": phalanx.BatchSampler(2, alone, batch_size=2),
        "step": JoinedStep(model, 1, 1),
        "pending": phalanx.async_all_reduce(torch.ones(1), alone),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "pipeline": phalanx.Pipeline,
        "loss": torch.ones(1),
        "x": torch.ones(1),
    }


def resolve(node: ast.expr, names: dict[str, Any]) -> Any:
    """The object that an expression names, with the options of its calls checked and not called."""
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(resolve(node.value, names), node.attr)
    if isinstance(node, ast.Call):
        function = resolve(node.func, names)
        if function is Tensor.to or getattr(function, "__name__", "") == "to":  # in C++
            return function
        signature = inspect.signature(function)
        options = {each.arg for each in node.keywords}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        assert takes_any or options <= {*signature.parameters}, (options, signature)
        room = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if not any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
            assert len(node.args) <= len(room), (node.args, signature)
        for value in [*node.args, *(each.value for each in node.keywords)]:
            for inner in ast.walk(value):
                if isinstance(inner, (ast.Attribute, ast.Call)):
                    resolve(inner, names)
        return function
    raise AssertionError(ast.unparse(node))


def check_command(words: list[str]) -> None:
    """A command of Phalanx is there, and has the options."""
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    assert command.name in words[1:]
    assert not hasattr(command, "commands")
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("-")} <= known


ELSEWHERE = {"torchrun", "_", "with"}  # what is no name of ours


@pytest.mark.parametrize("code", spans("Phalanx"))
def test_every_name_of_phalanx_on_the_page_is_there(code: str) -> None:
    if code.startswith("phalanx "):
        check_command(shlex.split(code))
    elif re.fullmatch(r"PHALANX_[A-Z_]+", code):
        assert f"`{code}" in (DOCS / "failures.md").read_text()
    elif code not in ELSEWHERE:
        resolve(ast.parse(code, mode="eval").body, of_phalanx())


@pytest.mark.parametrize("code", ["phalanx.Nothing", "phalanx.DDP(nothing=1)", "backend.nothing"])
def test_a_name_that_is_not_there_would_be_noticed(code: str) -> None:
    with pytest.raises((AttributeError, AssertionError)):
        resolve(ast.parse(code, mode="eval").body, of_phalanx())


@pytest.mark.parametrize("code", ["phalanx nothing", "phalanx run --nothing train.py"])
def test_a_command_that_is_not_there_would_be_noticed(code: str) -> None:
    with pytest.raises(AssertionError):
        check_command(code.split())


# Names of torch ---------------------------------------------------------------------------------

SHORT = (  # where torch has the names that the page gives without their module
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.algorithms",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.amp",
    "torch.nn",
    "torch.nn.parallel",
    "torch.nn.utils",
    "torch.utils.data",
)


@cache
def of_torch() -> dict[str, Any]:
    hooks = "torch.distributed.algorithms.ddp_comm_hooks"
    for part in ("default_hooks", "powerSGD_hook", "post_localSGD_hook"):
        importlib.import_module(f"{hooks}.{part}")
    for part in ("pipelining", "checkpoint", "tensor.parallel", "device_mesh"):
        importlib.import_module(f"torch.distributed.{part}")
    found: dict[str, Any] = {"torch": torch, "dist": dist}
    for name in SHORT:
        module = importlib.import_module(name)
        found = {**vars(module), **found}
    return found


OPTIONS_OF_TORCH: dict[str, tuple[Any, str]] = {
    "world_size": (dist.init_process_group, "world_size"),
    "find_unused_parameters": (DistributedDataParallel, "find_unused_parameters"),
}
VARIABLES_OF_TORCH = {
    "LOCAL_RANK": "distributed/elastic/agent/server/local_elastic_agent.py",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "distributed/distributed_c10d.py",
}
METHODS_OF_TORCH = {"no_sync": DistributedDataParallel, "state_dict": nn.Module}


@pytest.mark.parametrize("code", [*spans("torch"), *spans("term")])
def test_every_name_of_torch_on_the_page_is_there(code: str) -> None:
    if code == "torchrun":
        assert importlib.util.find_spec("torch.distributed.run")
    elif code in VARIABLES_OF_TORCH:
        source = Path(torch.__path__[0], VARIABLES_OF_TORCH[code]).read_text()
        assert code.partition("=")[0] in source
    elif code in OPTIONS_OF_TORCH:
        function, option = OPTIONS_OF_TORCH[code]
        assert option in inspect.signature(function).parameters
    elif code in METHODS_OF_TORCH:
        assert hasattr(METHODS_OF_TORCH[code], code)
    elif code != "module":  # the beginning of names: see below
        resolve(ast.parse(code, mode="eval").body, of_torch())


# Search, links ----------------------------------------------------------------------------------


def test_the_table_has_every_term_and_where_it_leads() -> None:
    (rows,) = (rows for head, rows in tables() if head[0] == "term")
    terms = [term.strip(" `").replace(" ", "_") for row in rows for term in row[0].split(",")]
    assert sorted(terms) == sorted(TERMS)  # each once
    assert all(re.search(r"\]\([\w/-]+\.md", guide) for _, _, guide in rows)
    assert all(term in PAGE or term.replace("_", " ") in PAGE for term in TERMS)


def test_the_search_of_the_site_finds_the_terms(tmp_path: Path) -> None:
    """The page alone is built, with the site's theme; words are cut as lunr cuts them."""
    pytest.importorskip("material")
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(PAGE)
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: Phalanx\ntheme:\n  name: material\n  font: false\nplugins: [search]\n"
    )
    build.build(config.load_config(str(tmp_path / "mkdocs.yml")))
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    separator = index["config"]["separator"]
    text = " ".join(re.sub(r"<[^>]+>", " ", entry["text"]) for entry in index["docs"])
    words = {re.sub(r"^\W+|\W+$", "", word) for word in re.split(separator, text)}
    wanted = {
        word for term in TERMS for word in (term.split("_") if "gradient_" in term else [term])
    }
    assert wanted - words == set()


def anchors(page: str) -> set[str]:
    """The anchors of a page as the site has them: of headings, and of what the reference shows."""
    found = set()
    for title in re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M), re.M
    ):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", title).lower()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip()))
    return found | set(re.findall(r"^::: (\S+)", page, re.MULTILINE))


def test_every_link_of_the_page_leads_to_a_page_and_an_anchor_that_are_there() -> None:
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", PAGE)
    assert len(links) > 40
    for target, anchor in links:
        page = (DOCS / target).read_text() if target else PAGE
        assert not anchor or anchor in anchors(page), (target, anchor)


# Diffs ------------------------------------------------------------------------------------------


def sides(diff: str) -> tuple[str, str]:
    """The script before, and the one after."""
    assert all(line[:1] in {" ", "-", "+"} for line in diff.splitlines())
    before, after = (
        "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(other)) + "\n"
        for other in "+-"
    )
    return before, after


SPAWN = """
import json, os, runpy, sys
import torch

def rank_of(rank, script, questions, port):
    global scope
    os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    scope = runpy.run_path(script, run_name="__main__")
    answers = {question: eval(question, scope) for question in questions}
    with open(f"answers-{rank}.json", "w") as file:
        json.dump(answers, file)

script, port, *questions = sys.argv[1:]
torch.multiprocessing.start_processes(
    rank_of, (script, questions, port), nprocs=2, start_method="fork"
)
"""
# fork: the process that spawns has imported torch already. global: the destructor of torch's DDP
# holds the GIL while it joins Gloo's thread, and that may wait for the GIL to free its last work.


def on_two_ranks_of_torch(source: str, folder: Path, *questions: str) -> list[dict[str, Any]]:
    """Run a script by torch's own launcher; answers to questions about its variables, by rank."""
    folder.mkdir()
    (folder / "script.py").write_text(source)
    (folder / "start.py").write_text(SPAWN)
    words = [str(folder / "start.py"), str(folder / "script.py"), str(unused_port()), *questions]
    ended = run_python(words, folder=folder)
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / f"answers-{rank}.json").read_text()) for rank in (0, 1)]


def on_two_ranks_of_phalanx(source: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "train.py").write_text(source)
    for ended in run_job([str(folder / "train.py")], 2, folder=folder):
        assert ended.returncode == 0, ended.stderr


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


def test_both_sides_of_the_ddp_diff_end_with_the_same_parameters(tmp_path: Path) -> None:
    before, after = sides(DDP_DIFF)
    (answers, _) = on_two_ranks_of_torch(before, tmp_path / "torch", "[*model.state_dict()]")
    on_two_ranks_of_phalanx(after, tmp_path / "phalanx")
    mine, theirs = (torch.load(tmp_path / side / "model.pt") for side in ("phalanx", "torch"))
    assert_same(mine, theirs)
    assert [f"module.{name}" for name in mine] == answers["[*model.state_dict()]"]
    torch.manual_seed(0)
    torch.randn(256, 8), torch.randn(256, 1)
    first = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).state_dict()
    assert all((mine[name] - value).abs().max() > 0.01 for name, value in first.items())  # trained


def test_both_sides_of_the_fsdp2_diff_end_with_the_same_parameters(tmp_path: Path) -> None:
    before, after = sides(FSDP2_DIFF)
    kind = "type(model[0].weight).__name__"
    answers = on_two_ranks_of_torch(before, tmp_path / "torch", kind)
    assert [answer[kind] for answer in answers] == ["DTensor", "DTensor"]
    on_two_ranks_of_phalanx(after, tmp_path / "phalanx")
    assert_same(*(torch.load(tmp_path / side / "model.pt") for side in ("phalanx", "torch")))


def test_both_sides_of_the_accelerate_diff_end_with_the_same_parameters(tmp_path: Path) -> None:
    """Accelerate's side where it is installed; without it, the same steps in one process."""
    before, after = sides(ACCELERATE_DIFF)
    on_two_ranks_of_phalanx(after, tmp_path / "phalanx")
    torch.manual_seed(0)
    x, y = torch.randn(256, 8), torch.randn(256, 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        for inputs, targets in zip(x.split(32), y.split(32), strict=True):
            nn.functional.mse_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    trained = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    loaded = phalanx.load_checkpoint(tmp_path / "phalanx" / "runs" / "a", model=trained)
    assert loaded.step == 24
    assert_same(trained.state_dict(), model.state_dict())
    if importlib.util.find_spec("accelerate"):
        before = before.replace("Accelerator(", "Accelerator(cpu=True, ")
        on_two_ranks_of_torch(before, tmp_path / "accelerate")
        theirs = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        phalanx.load_pretrained(tmp_path / "accelerate" / "runs" / "a", theirs)
        assert_same(trained.state_dict(), theirs.state_dict())


# What differs -----------------------------------------------------------------------------------

TORCH_DIFFERS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layer = nn.Linear(2, 4)
own = layer.weight.detach().clone()
fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
cut_its_own = torch.equal(layer.weight.to_local(), own.chunk(2)[dist.get_rank()])
returned = dist.all_reduce(torch.ones(1))


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


ddp = DistributedDataParallel(TwoLayers())
ddp(torch.ones(1, 2)).sum().backward()
try:
    ddp(torch.ones(1, 2))
    error = ""
except RuntimeError as e:
    error = str(e)
dist.barrier()
dist.destroy_process_group()
"""


def test_what_the_page_says_of_torch(tmp_path: Path) -> None:
    questions = "cut_its_own", "returned", "'find_unused_parameters' in error"
    answers = on_two_ranks_of_torch(TORCH_DIFFERS, tmp_path / "torch", *questions)
    assert [[*answer.values()] for answer in answers] == [[True, None, True]] * 2
    assert dist.distributed_c10d.default_pg_timeout.total_seconds() == 30 * 60
    dealt = [[*DistributedSampler(range(5), 2, rank, shuffle=False)] for rank in (0, 1)]
    assert sorted(dealt[0] + dealt[1]) == [0, 0, 1, 2, 3, 4]
    join = inspect.signature(DistributedDataParallel.join).parameters
    assert join["divide_by_initial_world_size"].default is True
    own = inspect.signature(DistributedDataParallel).parameters["gradient_as_bucket_view"]
    assert own.default is False
    assert torch.distributed.fsdp.MixedPrecisionPolicy().reduce_dtype is None


def two_layers() -> nn.Module:
    scope: dict[str, Any] = {"nn": nn}
    exec(re.findall(r"^class TwoLayers.*?\n\n\n", TORCH_DIFFERS, re.S | re.M)[0], scope)
    model: nn.Module = scope["TwoLayers"]()
    return model


def unused_parameter(backend: Backend) -> None:
    phalanx.DDP(two_layers(), backend)(torch.ones(1, 2)).sum().backward()


def other_order(backend: Backend) -> None:
    first, second = phalanx.all_reduce, phalanx.all_gather
    (first if backend.rank else second)(torch.ones(1), backend)


def uneven_parts(backend: Backend) -> None:
    phalanx.all_gather(torch.ones(1 + backend.rank), backend)


def pickled(backend: Backend) -> None:
    phalanx.all_gather_object(object(), backend)


def by_parameters(backend: Backend) -> None:
    phalanx.clip_grad_norm_(phalanx.DDP(nn.Linear(2, 2), backend).parameters(), 1.0)  # type: ignore[arg-type]


def whole_matrices(backend: Backend) -> None:
    model = phalanx.FSDP(nn.Linear(2, 2), backend)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.Adafactor(model.parameters()).step()


REFUSED: Sequence[tuple[Callable[[Backend], None], type[Exception], str]] = (
    (unused_parameter, phalanx.MisuseError, "no gradient came for unused.bias, unused.weight"),
    (other_order, phalanx.DesyncError, "called all_gather.*\n.*called all_reduce"),
    (uneven_parts, phalanx.DesyncError, "called all_gather.*\n.*called all_gather"),
    (pickled, phalanx.UnsupportedObjectError, "object"),
    (by_parameters, TypeError, "takes the model"),
    (whole_matrices, phalanx.MisuseError, "use phalanx.ShardedOptimizer"),
)


@pytest.mark.parametrize(
    ("call", "error", "words"), REFUSED, ids=lambda each: getattr(each, "__name__", "")
)
def test_what_the_page_says_is_refused(
    call: Callable[[Backend], None], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        phalanx.simulate(call, 2)


def what_differs(backend: Backend) -> None:
    ones = torch.ones(2)
    assert phalanx.all_reduce(ones, backend).tolist() == [2, 2]
    assert ones.tolist() == [1, 1]
    phalanx.all_reduce_(ones, backend)
    assert ones.tolist() == [2, 2]
    assert phalanx.all_gather(torch.tensor([backend.rank]), backend).tolist() == [0, 1]
    if backend.rank == 1:  # only members call
        assert backend.subgroup([1]).rank == 0
    sampler = partial(phalanx.BatchSampler, 6, backend, batch_size=4, shuffle=False)
    assert [*sampler()] == [[[0, 1], [4]], [[2, 3], [5]]][backend.rank]
    torch.manual_seed(backend.rank)
    fsdp = phalanx.FSDP(nn.Linear(2, 2), backend)
    assert {value.dim() for value in fsdp.parameters()} == {1}
    assert {value.dim() for value in fsdp.state_dict().values()} == {1}
    torch.manual_seed(0)
    assert torch.equal(fsdp.full_state_dict()["weight"], nn.Linear(2, 2).weight)


def test_what_the_page_says_of_phalanx() -> None:
    phalanx.simulate(what_differs, 2)
    assert phalanx.DEFAULT_TIMEOUT == 60
    assert phalanx.MixedPrecision().reduce_dtype is torch.float32
    join = inspect.signature(phalanx.DDP.join).parameters["divide_by_initial_world_size"]
    assert join.default is False


ABSENT = {
    "offload": r"offload",
    "FP8": r"_scaled_mm|torchao|transformer_engine",
    "DTensor": r"\bDTensor\b",
    "ignored_params": r"ignored_(params|parameters|states|modules)",
    "ring attention": r"ring.attention|context.parallel",
    "expert parallelism": r"\bexperts?\b",
    "added or removed": r"\b(min|max)_n?nodes\b|--elastic",
    "Adasum": r"adasum",
    "learning rate schedules": r"LRScheduler\)",
}


@cache
def sources() -> str:
    files = [*(ROOT / "src").rglob("*.py")]
    assert len(files) > 100
    return "".join(file.read_text() for file in files if "bench" not in file.parts)


@pytest.mark.parametrize("feature", ABSENT)
def test_what_the_page_says_is_not_in_phalanx_is_not_in_its_source(feature: str) -> None:
    assert feature in PAGE.split("## Not in Phalanx")[1]
    assert re.findall(ABSENT[feature], sources(), re.IGNORECASE) == []
