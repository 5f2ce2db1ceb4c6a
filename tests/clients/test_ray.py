"""Ray Train and Ray's collectives, of the real Ray: a cluster of this machine, for all tests."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'phalanx[ray]'")

import numpy as np
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.experimental import internal_kv
from ray.train import (
    Checkpoint,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.collective import collective
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.types import ReduceOp
from torch import nn

import phalanx
from phalanx.ops.clusters.ray import PhalanxConfig, places
from phalanx.ops.clusters.ray_collective import PhalanxGroup

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers do not import it

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own code is full of them

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[Cluster]:
    """One node for workers that need a core, and two nodes, each for one that needs a slot."""
    quick = {
        "HEALTH_CHECK_INTERVAL_S": "1",
        "WORKER_GROUP_START_TIMEOUT_S": "5",  # of a placement on nodes that have died
        "ENABLE_PREEMPTION_WATCHER": "0",
        "METRICS_ENABLED": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in quick.items():
            patch.setenv(f"RAY_TRAIN_{name}", value)
        system = {"worker_niceness": 0}  # or all else on this machine goes before them
        options = {"num_cpus": 4, "include_dashboard": False, "_system_config": system}
        cluster = Cluster(initialize_head=True, head_node_args=options)
        for _ in range(2):  # now: later ones would be seen by Ray Train after 20 s
            cluster.add_node(num_cpus=0, resources={"slot": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def fit(fn: Callable[[dict[str, Any]], object], folder: Path, **options: Any) -> Any:
    """Run `fn` on two workers; return what it has returned on rank 0."""
    workers, failures = options.pop("workers", 2), options.pop("max_failures", 0)
    resources = options.pop("resources", None)
    trainer = options.pop("trainer", partial(DataParallelTrainer, backend_config=PhalanxConfig()))
    result = trainer(
        fn,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker=resources),
        run_config=RunConfig(
            storage_path=str(folder), failure_config=FailureConfig(max_failures=failures)
        ),
    ).fit()
    return result.return_value


def kill_after_report(*, node: bool = False) -> None:
    """Kill this process, or its node, when Ray knows of all that was reported."""
    ray.train.get_all_reported_checkpoints()
    victim = os.getppid() if node else os.getpid()
    assert not node or b"raylet" in Path(f"/proc/{victim}/cmdline").read_bytes()
    os.kill(victim, signal.SIGKILL)
    signal.pause()  # a worker ends with its node


# Who is where -------------------------------------------------------------------------------------


def test_local_ranks_come_from_the_nodes_whatever_the_order_of_ranks() -> None:
    found = places(["a", "b", "a", "c", "b", "a"])
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [" ".join(each[name] for name in names) for each in found] == [
        "0 0 3 0 3",
        "1 0 2 1 3",
        "2 1 3 0 3",
        "3 0 1 2 3",
        "4 1 2 1 3",
        "5 2 3 0 3",
    ]


@pytest.mark.parametrize("module", ["ray", "ray_collective"])
def test_without_ray_the_error_says_what_to_install(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"phalanx.ops.clusters.{module}")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"needs Ray.*pip install 'phalanx\[ray\]'"):
        importlib.import_module(f"phalanx.ops.clusters.{module}")


# A function of one's own --------------------------------------------------------------------------


def test_init_works_in_the_training_function_and_shares_memory(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> dict[str, Any]:
        backend = phalanx.init()
        tokens = phalanx.all_gather_object(os.environ["PHALANX_TOKEN"], backend)
        places = phalanx.all_gather_object(
            [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")], backend
        )
        total = phalanx.all_reduce(torch.tensor(backend.rank + 1.0), backend).item()
        found = {
            "total": total,
            "places": places,
            "tokens": len(set(tokens)),
            "kind": type(backend).__name__,
        }
        backend.close()
        return found

    assert fit(train, tmp_path) == {
        "total": 3.0,
        "places": [["0", "0", "2"], ["1", "1", "2"]],
        "tokens": 1,
        "kind": "SharedMemoryBackend",
    }


def train_and_save(config: dict[str, Any], backend: phalanx.Backend | None = None) -> Any:
    """A training script; with a `backend` it is not under Ray, and is not interrupted."""
    under_ray = backend is None
    backend = backend or phalanx.init()
    torch.manual_seed(0)
    model = phalanx.DDP(nn.Linear(4, 1), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = 0
    checkpoint = ray.train.get_checkpoint() if under_ray else None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            start = phalanx.load_checkpoint(folder, model=model, optimizer=optimizer).step
    for step in range(start, STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(2 * step + backend.rank)
        inputs = torch.randn(8, 4, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if not under_ray:
            continue
        folder = ray.train.get_context().get_storage().experiment_fs_path
        saved = phalanx.save_checkpoint(
            folder, model=model, optimizer=optimizer, step=step + 1, keep=None
        )
        ray.train.report(
            {"loss": loss.item()},
            checkpoint=Checkpoint.from_directory(saved.folder),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )
        if checkpoint is None and step + 1 == config["killed_after"] and backend.rank == 1:
            kill_after_report(node=config["kill_node"])
    weights = [value for each in model.parameters() for value in each.flatten().tolist()]
    found = {"start": start, "ranks": backend.world_size, "weights": weights}
    backend.close()
    return found


def test_a_run_whose_worker_is_killed_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    found = fit(train_and_save, tmp_path, killed_after=2, kill_node=False, max_failures=1)
    uninterrupted = phalanx.simulate(partial(train_and_save, {}), 2)
    assert found == {**uninterrupted[0], "start": 2}


def test_rays_error_has_the_line_that_names_the_killed_rank(tmp_path: Path) -> None:
    with pytest.raises(ray.train.WorkerGroupError) as told:
        fit(train_and_save, tmp_path, killed_after=2, kill_node=False)
    line = r"PeerLostError: rank 0: all_reduce #\d+ .*: rank 1 was lost"
    assert re.search(line, str(told.value))  # which Ray cuts in the middle
    survivor = told.value.worker_failures[0]
    assert isinstance(survivor, phalanx.PeerLostError)
    assert survivor.peer == 1


def test_an_elastic_run_that_loses_a_node_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    elastic = {"workers": (1, 2), "resources": {"slot": 1}, "max_failures": 1}
    found = fit(train_and_save, tmp_path, killed_after=2, kill_node=True, **elastic)
    assert (found["start"], found["ranks"]) == (2, 1)


def test_the_example_runs(tmp_path: Path, ray_cluster: Cluster) -> None:
    script = Path(__file__).parents[2] / "examples" / "ray_train.py"
    ended = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": ray_cluster.address},
        capture_output=True,
        text=True,
        check=False,
    )
    loss = re.search(r"^loss (\S+)$", ended.stdout, re.MULTILINE)
    assert loss, ended.stderr
    assert float(loss[1]) < 0.5  # of 8 at the start
    assert len(list((tmp_path / "runs").glob("*/000003-step-30/commit.json"))) == 1


# A stock script of Ray's for torch ----------------------------------------------------------------


def losses_of(wrap: Callable[[nn.Module], nn.Module], *, killed_after: int = 0) -> list[float]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rank = ray.train.get_context().get_world_rank()
    losses = []
    for step in range(1, STEPS + 1):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = nn.functional.mse_loss(model(inputs), inputs.prod(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == killed_after:
            ray.train.report({"loss": loss.item()})
            if rank == 1:
                kill_after_report()
    return losses


ON_PHALANX = partial(TorchTrainer, torch_config=TorchConfig(backend="phalanx"))


def test_a_stock_script_for_torch_trainer_has_the_losses_of_gloo(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> tuple[str, list[float], list[float]]:
        gloo = torch.distributed.new_group(backend="gloo")
        on_gloo = partial(nn.parallel.DistributedDataParallel, process_group=gloo)
        used = torch.distributed.get_backend()
        return used, losses_of(prepare_model), losses_of(on_gloo)

    used, ours, gloos = fit(train, tmp_path, trainer=ON_PHALANX)
    assert used == "phalanx"
    assert ours == gloos


def test_the_survivors_error_under_torch_trainer_names_the_killed_rank(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        losses_of(prepare_model, killed_after=2)

    with pytest.raises(ray.train.WorkerGroupError) as told:
        fit(train, tmp_path, trainer=ON_PHALANX)
    survivor = told.value.worker_failures[0]  # of torch's DDP, which has our error's text
    assert re.search(r"PeerLostError: rank 0: all_reduce .*: rank 1 was lost", str(survivor))


# Collectives among actors -------------------------------------------------------------------------


class Actor:
    """Runs what it is told."""

    def __init__(self) -> None:
        register_collective_backend("PHALANX", PhalanxGroup)

    def run(self, fn: Callable[..., Any], *arguments: Any) -> Any:
        return fn(*arguments)


@pytest.fixture(scope="module")
def actors(ray_cluster: Cluster) -> list[Any]:
    """Two, which have joined the group "pair" as its ranks."""
    actors = [ray.remote(Actor).options(num_cpus=0).remote() for _ in range(2)]
    on_each(actors, partial(join, name="pair"))
    return actors


def on_each(actors: list[Any], fn: Callable[[int], Any]) -> list[Any]:
    """Run `fn(rank)` on each actor; the results in rank order."""
    return ray.get([actor.run.remote(fn, rank) for rank, actor in enumerate(actors)])


def join(rank: int, *, name: str) -> None:
    collective.init_collective_group(2, rank, backend="PHALANX", group_name=name)


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_the_collectives_of_a_group_of_actors(actors: list[Any], kind: str) -> None:
    def run(rank: int) -> dict[str, list[Any]]:
        def new(*values: float) -> Any:
            return torch.tensor(values) if kind == "tensors" else np.array(values)

        def of_both(call: Callable[..., None], *arguments: Any, **options: Any) -> list[Any]:
            call(*arguments, group_name="pair", **options)
            return arguments[0].tolist()

        found = {}
        for name in ("SUM", "PRODUCT", "MIN", "MAX"):
            found[name] = of_both(collective.allreduce, new(rank + 2, 5), op=ReduceOp[name])
        found["reduce"] = of_both(collective.reduce, new(rank + 1, 1), dst_rank=1)
        found["broadcast"] = of_both(collective.broadcast, new(rank + 7, 0), src_rank=1)
        gathered = [new(0, 0), new(0, 0)]
        collective.allgather(gathered, new(rank, 9), group_name="pair")
        found["allgather"] = [each.tolist() for each in gathered]
        parts = [new(1, rank), new(2, rank)]
        found["reducescatter"] = of_both(collective.reducescatter, new(0, 0), parts)
        if rank == 0:
            found["message"] = of_both(collective.send, new(4, 2), dst_rank=1)
        else:
            found["message"] = of_both(collective.recv, new(0, 0), src_rank=0)
        collective.barrier(group_name="pair")
        return found

    same = {
        "SUM": [5.0, 10.0],
        "PRODUCT": [6.0, 25.0],
        "MIN": [2.0, 5.0],
        "MAX": [3.0, 5.0],
        "broadcast": [8.0, 0.0],
        "allgather": [[0.0, 9.0], [1.0, 9.0]],
        "message": [4.0, 2.0],
    }
    assert on_each(actors, run) == [
        {**same, "reduce": [1.0, 1.0], "reducescatter": [2.0, 1.0]},
        {**same, "reduce": [3.0, 2.0], "reducescatter": [4.0, 1.0]},
    ]


def test_what_a_group_cannot_use_is_refused_before_anything_is_sent(actors: list[Any]) -> None:
    def refused(rank: int) -> list[str]:
        constant = np.zeros(2)
        constant.flags.writeable = False
        calls = [
            partial(collective.allreduce, constant),
            partial(collective.allgather, [torch.zeros(2), torch.zeros(3)], torch.zeros(2)),
            partial(collective.reducescatter, torch.zeros(2), [torch.zeros(2), np.zeros(2)]),
        ]
        told = []
        for call in calls:
            with pytest.raises(phalanx.DistributedError) as info:
                call(group_name="pair")
            told.append(f"{type(info.value).__name__}: {info.value}")
        total = torch.ones(1)
        collective.allreduce(total, group_name="pair")
        return [*told, str(total.item())]

    (told, _) = on_each(actors, refused)
    assert told[0].startswith("MisuseError: rank 0: allreduce writes to the array")
    assert "read-only" in told[0]
    assert "number 1 of the list is torch.float32 [3]" in told[1]
    assert "number 1 of the list is torch.float64 [2]" in told[2]
    assert told[3] == "2.0"


def test_a_group_is_left_and_made_anew_under_the_same_name(actors: list[Any]) -> None:
    def run(rank: int) -> list[float]:
        found = []
        for _ in range(5):
            join(rank, name="again")
            total = torch.tensor([rank + 1.0])
            collective.allreduce(total, group_name="again")
            found.append(total.item())
            collective.destroy_collective_group("again")
        return found

    assert on_each(actors, run) == [[3.0] * 5] * 2
    assert not [key for key in internal_kv._internal_kv_list("phalanx/") if b"again" in key]


def test_a_group_that_the_driver_declares(actors: list[Any]) -> None:
    register_collective_backend("PHALANX", PhalanxGroup)
    collective.create_collective_group(actors, 2, [1, 0], backend="PHALANX", group_name="declared")

    def run(number: int) -> tuple[int, float]:
        total = torch.tensor([number + 1.0])
        collective.allreduce(total, group_name="declared")
        return collective.get_rank("declared"), total.item()

    assert on_each(actors, run) == [(1, 3.0), (0, 3.0)]


def test_the_survivor_of_a_killed_actor_names_its_rank(actors: list[Any]) -> None:
    def run(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        collective.allreduce(torch.ones(2), group_name="pair")

    survivor, killed = (actor.run.remote(run, rank) for rank, actor in enumerate(actors))
    with pytest.raises(phalanx.PeerLostError, match=r"rank 0: all_reduce .*: rank 1 ") as told:
        ray.get(survivor)
    assert told.value.cause.peer == 1
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(killed)
