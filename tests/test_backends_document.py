"""docs/backends.md: the table of what each backend can, and refuses."""

from __future__ import annotations

from pathlib import Path

from clusters import CLUSTERS

import phalanx
from phalanx import ReduceOp
from phalanx.launch.init import BACKENDS
from phalanx.native.torch_library import KINDS

DOCUMENT = (Path(__file__).parent.parent / "docs" / "backends.md").read_text()


def test_every_backend_is_in_the_table() -> None:
    names = {name for name in dir(phalanx) if name.endswith("Backend")}
    missing = {name for name in names - {"Backend", "SubBackend"} if f"`{name}`" not in DOCUMENT}
    assert not missing


def test_every_name_that_init_takes_is_in_the_table() -> None:
    (row,) = (line for line in DOCUMENT.splitlines() if line.startswith("| name for `init`"))
    assert {name for name in BACKENDS if f"`{name}`" not in row} <= {"auto"}


def test_whose_ranks_have_memory_in_common_is_as_the_document_says() -> None:
    (row,) = (line for line in DOCUMENT.splitlines() if line.startswith("| memory that all ranks"))
    simulated, ours, gloo, *_ = (cell.strip() for cell in row.split("|")[2:])
    has_some = {cluster.name: "memory" not in cluster.lacks for cluster in CLUSTERS}
    assert (simulated, gloo) == ("yes", "groups on one host")
    assert has_some["simulated"]
    assert has_some["gloo"]
    for name in ("tcp", "shm"):
        assert (f"`{name}`" in ours) == has_some[name]


def test_what_gloo_computes_is_as_the_document_says() -> None:
    (row,) = (line for line in DOCUMENT.splitlines() if line.startswith("| Gloo |"))
    sums, means, rest = row.split("|")[2].split(";")
    dtypes = KINDS["gloo"]["cpu"].dtypes
    named = {word.strip() for word in sums.split(":")[1].split(",")}
    assert named == {str(dtype).removeprefix("torch.") for dtype in dtypes[ReduceOp.SUM]}
    assert dtypes[ReduceOp.PRODUCT] == dtypes[ReduceOp.SUM]
    assert {str(dtype) for dtype in dtypes[ReduceOp.SUM] - dtypes[ReduceOp.MEAN]} == {
        "torch.float16"
    }
    assert "these without float16" in means
    whole = {dtype for dtype in dtypes[ReduceOp.SUM] if not dtype.is_floating_point}
    for op in set(ReduceOp) - {ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT}:
        assert op.value in rest
        assert dtypes[op] == whole
