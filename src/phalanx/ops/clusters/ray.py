"""Ray Train: `phalanx.init()` in the training function of a `DataParallelTrainer`.

    controller                               worker 0            worker 1 ...
      | on which node are you?  ---------------> | --------------> |
      | hold a store, at a free port  ---------> |                 |
      | RANK, LOCAL_RANK, the store, a token --> | --------------> |
                                           training function, training function
                                           phalanx.init() <---> phalanx.init()

The ranks meet through the store, torch's, as they do under `torchrun`; the token seals their
entries. Ray starts a fresh process for each worker, also after a failure, and when it changes their
number: all of this is done anew then.

`TorchTrainer(torch_config=TorchConfig(backend="phalanx"))` needs nothing from here.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from phalanx.launch.store import listen_for_store
from phalanx.wire.control import Endpoint

try:
    import ray
    from ray.train.backend import Backend as TrainBackend
    from ray.train.backend import BackendConfig
except ImportError as error:
    raise ImportError(
        f"phalanx.ops.clusters.ray needs Ray Train ({error}): pip install 'phalanx[ray]'"
    ) from error


class PhalanxConfig(BackendConfig):  # type: ignore[misc] # mypy is run without Ray
    """The configuration that makes `phalanx.init()` work in the workers of Ray Train.

    DataParallelTrainer(fn, backend_config=PhalanxConfig(), scaling_config=ScalingConfig(...))

    Each worker is a rank. Before the training function runs, each has the environment of `phalanx
    run` and `torchrun`, and a token that is new for each start of the workers. Those of one node
    share memory. `torch.distributed.init_process_group` finds its store, too.
    """

    @property
    def backend_cls(self) -> type[PhalanxTrainBackend]:
        """Class that Ray calls when the workers have been started."""
        return PhalanxTrainBackend


class PhalanxTrainBackend(TrainBackend):  # type: ignore[misc]
    """Tells each worker its rank, and the address of the rendezvous."""

    # A rank of "auto" takes GPU number LOCAL_RANK of those that it sees: it sees its node's.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: PhalanxConfig) -> None:
        """Hold a store in worker 0; set the environment of all. Called by Ray."""
        nodes: list[str] = worker_group.execute(_node)
        host, port = worker_group.execute_single(0, _hold, one_node=len(set(nodes)) == 1)
        common = {
            "WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
            "PHALANX_TOKEN": secrets.token_hex(32),
        }
        ray.get(
            [
                worker_group.execute_single_async(rank, _enter, {**common, **own})
                for rank, own in enumerate(places(nodes))
            ]
        )


def places(nodes: Sequence[str]) -> list[Mapping[str, str]]:
    """Return the variables of each rank's place: `nodes` are the ranks' node ids, in any order.

    Ranks of one node need not follow one another: nodes a b a make local ranks 0 0 1.
    """
    sizes = Counter(nodes)
    numbers = {node: number for number, node in enumerate(sizes)}  # by their first rank
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(sizes[node]),
            "GROUP_RANK": str(numbers[node]),
            "GROUP_WORLD_SIZE": str(len(sizes)),
        }
        for rank, node in enumerate(nodes)
    ]


# ------------------------------------------------------------------------------
# The workers' part.


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _enter(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)


def _hold(*, one_node: bool) -> tuple[str, int]:
    """Hold a store that the other workers can reach; return its host and port."""
    host = "127.0.0.1" if one_node else str(ray.util.get_node_ip_address())
    return host, _store(host).port


@cache
def _store(host: str) -> Any:
    """Return the store of this process, which holds it until it ends."""
    from phalanx.native.torch_formation import store_at  # noqa: PLC0415 -- torch comes with it

    listener = listen_for_store(host, 0)
    place = str(Endpoint(host, listener.getsockname()[1]))
    return store_at(0, 2, place, 60.0, listener)
