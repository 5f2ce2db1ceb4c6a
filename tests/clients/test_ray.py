"""Ray Train and Ray's collectives, of the real Ray: a cluster of this machine, for all tests."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'phalanx[ray]'")

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import (
    Checkpoint,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    UserCallback,
)
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from torch import nn

import phalanx
from phalanx.integrations.ray import PhalanxConfig, places

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers do not import it

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own code is full of them

STEPS = 4
POLL = "1"  # seconds between two looks of Ray's controller at its workers


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[Cluster]:
    """One node, to which tests may add others."""
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = POLL
    for name in ("ENABLE_PREEMPTION_WATCHER", "METRICS_ENABLED"):  # which take time to start
        os.environ[f"RAY_TRAIN_{name}"] = "0"
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
    )
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
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=failures),
            callbacks=[WriteErrors(folder)],
        ),
    ).fit()
    return result.return_value


class WriteErrors(UserCallback):
    """Writes the errors that Ray goes on from to a file for each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after_exception(self, run_context: object, worker_exceptions: dict[int, Exception]) -> None:
        for rank, error in worker_exceptions.items():
            (self.folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")


def kill_after_report() -> None:
    """Kill this process, when Ray knows of all that was reported."""
    ray.train.get_all_reported_checkpoints()
    os.kill(os.getpid(), signal.SIGKILL)


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
            kill_after_report()
    weights = [value for each in model.parameters() for value in each.flatten().tolist()]
    found = {"start": start, "ranks": backend.world_size, "weights": weights}
    backend.close()
    return found


def test_a_run_whose_worker_is_killed_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    found = fit(train_and_save, tmp_path, killed_after=2, max_failures=1)
    uninterrupted = phalanx.simulate(partial(train_and_save, {}), 2)
    assert found == {**uninterrupted[0], "start": 2}
    survivors = (tmp_path / "error-0").read_text()
    assert re.match(r"PeerLostError: rank 0: all_reduce #\d+ .*: rank 1 ", survivors)


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


def test_rays_error_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        losses_of(prepare_model, killed_after=2)

    with pytest.raises(ray.train.WorkerGroupError) as told:
        fit(train, tmp_path, trainer=ON_PHALANX)
    assert re.search(r"PeerLostError: rank 0: all_reduce .*: rank 1 ", str(told.value))
    survivor = told.value.worker_failures[0]
    assert isinstance(survivor, phalanx.PeerLostError)
    assert survivor.peer == 1
