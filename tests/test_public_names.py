"""The names at the top level: few and documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx import Backend

MOST = 129
PACKAGES = [
    "aggregation",
    "backends",
    "checkpoint",
    "collectives",
    "compression",
    "elastic",
    "errors",
    "fsdp",
    "optim",
    "parallel",
    "pipeline",
    "tensor",
    "training",
]
IN_TRAINING_SCRIPTS = set(
    """
    init spawn simulate
    DDP FSDP ShardingStrategy MixedPrecision
    Pipeline PipelineParallelConfig split_into_stages balance_stages
    ColumnParallelLinear RowParallelLinear ParallelEmbedding parallelize shard_tensor gather_shards
    DeviceMesh SyncBatchNorm GradScaler LocalSGD DiLoCo clip_grad_norm_ ShardedOptimizer
    save_checkpoint load_checkpoint load_pretrained latest_checkpoint
    GradientAggregator LocalAggregator AllReduceAggregator CompressedAggregator ParameterServer
    distributed_train_step train_epoch Notice Elastic
    TopK TopKCompressor PowerSGD Quantized ErrorFeedback
    CompressedGradient compress_gradients decompress_gradients
    """.split()  # noqa: SIM905 - a line for each kind
)


def is_documented(value: object) -> bool:
    """By a text of its own: neither inherited nor made by `dataclass`."""
    written = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    return bool(written) and not written.startswith(f"{getattr(value, '__name__', '')}(")


def test_dir_shows_the_public_names_and_packages_alone() -> None:
    shown = {name for name in dir(phalanx) if not name.startswith("__")}
    assert shown == {*phalanx.__all__, *PACKAGES, "launch"}
    assert all(importlib.import_module(f"phalanx.{name}") for name in (*PACKAGES, "launch"))


def test_there_are_few_names_and_each_is_there_once_and_documented() -> None:
    assert len(phalanx.__all__) == len(set(phalanx.__all__)) <= MOST
    assert [n for n in phalanx.__all__ if not is_documented(getattr(phalanx, n))] == []


def test_each_method_of_a_class_at_the_top_level_is_documented_there_or_in_a_base() -> None:
    missing = []
    for name in phalanx.__all__:
        value = getattr(phalanx, name)
        for method, member in inspect.getmembers(value) if inspect.isclass(value) else ():
            function = inspect.unwrap(getattr(member, "fget", member))
            is_ours = (getattr(function, "__module__", None) or "").startswith("phalanx")
            if is_ours and not method.startswith("_") and not inspect.getdoc(member):
                missing.append(f"{name}.{method}")
    assert missing == []


def test_what_a_training_script_names_is_at_the_top_level() -> None:
    missing = IN_TRAINING_SCRIPTS - {*phalanx.__all__}
    assert not missing


@pytest.mark.parametrize("package", ["backends", "collectives", "errors"])
def test_all_backends_collectives_and_errors_are_at_the_top_level(package: str) -> None:
    assert {*importlib.import_module(f"phalanx.{package}").__all__} <= {*phalanx.__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_names_of_a_package_are_listed_and_documented_there(package: str) -> None:
    module = importlib.import_module(f"phalanx.{package}")
    assert [n for n in module.__all__ if not is_documented(getattr(module, n))] == []
    at_the_top = {name for name in module.__all__ if name in phalanx.__all__}
    assert all(getattr(module, name) is getattr(phalanx, name) for name in at_the_top)


def opening(docstring: str) -> list[str]:
    """What comes before the arguments, which are aligned, and before the first heading."""
    lines = inspect.cleandoc(docstring).splitlines()
    ends = (n for n, line in enumerate(lines) if re.match(r"# |\w[\w, ]* {2,}\S", line))
    return "\n".join(lines[: next(ends, len(lines))]).strip().splitlines()


def test_ten_lines_say_what_a_class_does_and_what_is_more_stands_under_headings() -> None:
    classes = filter(inspect.isclass, (getattr(phalanx, name) for name in phalanx.__all__))
    long = [each for each in classes if len(inspect.cleandoc(each.__doc__ or "").splitlines()) > 20]
    assert {phalanx.DDP, phalanx.FSDP, phalanx.LocalSGD, phalanx.DiLoCo} <= {*long}
    assert [each.__name__ for each in long if not 4 <= len(opening(each.__doc__ or "")) <= 10] == []
    assert [each.__name__ for each in long if "\n    # Notes\n" not in str(each.__doc__)] == []


ONES = torch.ones(2)
OF_SIZES = {"ColumnParallelLinear", "RowParallelLinear", "ParallelEmbedding"}  # two, as torch's
OLD_ORDER: dict[str, Callable[[Any, Backend], object]] = {
    "send(tensor, backend, dst)": lambda f, b: f(ONES, 1, b),
    "recv(into, backend, src)": lambda f, b: f(ONES, None, b),
    "isend(tensor, backend, dst)": lambda f, b: f(ONES, 1, b),
    "irecv(into, backend, src)": lambda f, b: f(ONES, 1, b, tag=3),
    "sendrecv(tensor, backend, dst, into, src)": lambda f, b: f(ONES, 1, ONES, 1, b),
    "send_object(obj, backend, dst)": lambda f, b: f("text", 1, b),
    "recv_object(src, backend)": lambda f, b: f(b, 1),
    "all_to_all_uneven(tensor, backend, send_sizes, recv_sizes)": (
        lambda f, b: f(ONES, [1, 1], [1, 1], b)
    ),
    "parallelize(module, backend, plan)": lambda f, b: f(torch.nn.Linear(2, 2), {"": "row"}, b),
    "parallel_cross_entropy(logits, backend, targets)": lambda f, b: f(ONES, ONES, b),
    "ParameterServer.serve(params, backend, optimizer)": lambda f, b: f([ONES], torch.optim.SGD, b),
}


def public_functions() -> dict[str, Any]:
    packages = (package for package in PACKAGES if package != "errors")
    modules = [importlib.import_module(f"phalanx.{package}") for package in packages]
    found = {name: getattr(module, name) for module in modules for name in module.__all__}
    found["ParameterServer.serve"] = phalanx.ParameterServer.serve
    return {name: value for name, value in found.items() if callable(value)}


def positional(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


def test_the_backend_is_the_second_argument_or_else_the_first() -> None:
    arguments = {name: positional(function) for name, function in public_functions().items()}
    places = {n: given.index("backend") for n, given in arguments.items() if "backend" in given}
    assert {name for name, place in places.items() if place > 1} == OF_SIZES
    assert all(places[name] == 1 for name in ("DDP", "FSDP", "all_reduce", "broadcast_object"))


@pytest.mark.parametrize("call", OLD_ORDER)
def test_a_call_with_the_backend_elsewhere_shows_where_it_belongs(call: str) -> None:
    name, shown = call.rstrip(")").split("(")
    function = public_functions()[name]
    assert positional(function) == shown.split(", ")

    def run(backend: Backend) -> None:
        words = f"rank {backend.rank}: {call} takes the backend second, not "
        with pytest.raises(TypeError, match=f"^{re.escape(words)}"):
            OLD_ORDER[call](function, backend)
        assert phalanx.all_reduce(ONES, backend).tolist() == [2, 2]  # nothing was sent

    phalanx.simulate(run, 2)


def test_the_default_timeout_has_one_name() -> None:
    for function in (
        phalanx.init,
        phalanx.spawn,
        phalanx.simulate,
        phalanx.TcpBackend,
        phalanx.TorchBackend,
        phalanx.SimulatedBackend.create_group,
        importlib.import_module("phalanx.training").DistributedConfig.connect,
    ):
        default = inspect.signature(function).parameters["timeout"].default
        assert default is phalanx.DEFAULT_TIMEOUT
    (alone,) = phalanx.SimulatedBackend.create_group(1)
    assert alone.timeout == phalanx.DEFAULT_TIMEOUT


def test_a_name_that_never_was_is_missed_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match=r"^module 'phalanx' has no attribute 'Nothing'$"):
        phalanx.Nothing  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nothing' from 'phalanx'"):
        exec("from phalanx import Nothing")


def test_a_type_checker_sees_the_same_names() -> None:
    """It reads the imports under `TYPE_CHECKING`; at run time the table says where a name is."""
    tree = ast.parse(Path(phalanx.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.test, ast.Name)
    )
    seen: list[str] = []
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        names = [alias.name for alias in node.names]
        seen += importlib.import_module(str(node.module)).__all__ if names == ["*"] else names
    assert sorted(seen) == phalanx.__all__
