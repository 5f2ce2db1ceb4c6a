"""The names at the top level: few and documented."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import phalanx

MOST = 124
PACKAGES = [
    "aggregation",
    "backends",
    "checkpoint",
    "collectives",
    "compression",
    "errors",
    "fsdp",
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
    DeviceMesh SyncBatchNorm GradScaler LocalSGD DiLoCo clip_grad_norm_
    save_checkpoint load_checkpoint load_pretrained latest_checkpoint
    GradientAggregator LocalAggregator AllReduceAggregator CompressedAggregator ParameterServer
    distributed_train_step train_epoch Notice
    TopK TopKCompressor PowerSGD Quantized ErrorFeedback
    CompressedGradient compress_gradients decompress_gradients
    """.split()  # noqa: SIM905 - a line for each kind
)


def is_documented(value: object) -> bool:
    """By a text of its own: neither inherited nor made by `dataclass`."""
    written = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    return bool(written) and not written.startswith(f"{getattr(value, '__name__', '')}(")


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
