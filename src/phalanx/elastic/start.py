"""How a process finds its elastic job: by its environment, as who started it left that."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from functools import partial

from phalanx.core.backend import Backend
from phalanx.elastic.site import ProcessSite, SimulatedSite, Site
from phalanx.elastic.stores import open_store
from phalanx.errors import MisuseError, UnsupportedOperationError
from phalanx.launch.environment import ETCD, ElasticJob, read_elastic_environment, read_environment
from phalanx.training.notice import NoticeSignals
from phalanx.transport.simulated import SimulatedBackend
from phalanx.transport.simulated_process import SimulatedProcess
from phalanx.transport.tcp.admission import find_token
from phalanx.wire.control import Endpoint, parse_address

log = logging.getLogger("phalanx")
ANY = 1 << 30
_IN_JOBS: weakref.WeakSet[SimulatedProcess] = weakref.WeakSet()


def find_site(backend: str | Backend, store: object) -> tuple[Site, int, int]:
    """Return where this process lives, and the least and the largest number of ranks.

    store   the given one; None: that of the environment
    """
    if isinstance(backend, Backend):
        process = backend.process if isinstance(backend, SimulatedBackend) else None
        if process is None:
            raise UnsupportedOperationError(
                "Elastic takes the name of a backend, or the backend of a process of "
                f"phalanx.simulate, not {backend!r}: its group is made anew with each generation. "
                "Start a script with `phalanx run --min`"
            )
        if process in _IN_JOBS:
            raise MisuseError(
                f"process {process.number} of this simulation has an Elastic: a second training is "
                "another job, in another simulation"
            )
        _IN_JOBS.add(process)
        return SimulatedSite(process), 1, backend.world_size
    job = _find_job(store)
    if job is None:
        return ProcessSite(backend, None, Endpoint("127.0.0.1", 0), "", ""), 1, ANY
    if os.environ.get("PHALANX_METRICS", "").strip():
        log.warning("PHALANX_METRICS: an elastic job serves no metrics. The training goes on")
    where, token = job.store if store is None else store, find_token()
    opened = partial(open_store, where, token, job=job.job, launch=job.launch)
    site = ProcessSite(backend, opened, _route(where), job.job, token)
    return site, job.min_ranks or 1, job.max_ranks or ANY


def _find_job(store: object) -> ElasticJob | None:
    """Return the job of the environment; of `phalanx run` without --min, one of all its ranks."""
    job = read_elastic_environment(os.environ)
    if job is not None:
        return job
    if store is not None:
        name = os.environ.get("PHALANX_JOB", "")
        if not name:
            raise MisuseError(
                "Elastic(store=...): PHALANX_JOB is to name the job, the same for each process"
            )
        return ElasticJob(str(store), name, name)
    world = read_environment(os.environ)
    if world is None or world.world_size == 1:
        return None
    if not world.own_store:
        raise MisuseError(
            f"Elastic: {world.source} has started {world.world_size} fixed ranks: start them by "
            "`phalanx run --min`, or give each process PHALANX_STORE, PHALANX_JOB and PHALANX_TOKEN"
        )
    name = f"{world.run_id}-{world.restart_count}"
    where = str(Endpoint(world.master_addr, world.master_port))
    return ElasticJob(where, name, world.run_id, world.world_size, world.world_size)


def _route(where: object) -> Endpoint:
    """Return the address toward which other processes of the job are."""
    if not isinstance(where, str):
        host = getattr(where, "host", "") or os.environ.get("MASTER_ADDR", "")  # a TCPStore has one
        return Endpoint(str(host) or "127.0.0.1", 1)
    return parse_address(where.removeprefix(ETCD).split(",")[0])


def leave_when_told(site: Site) -> NoticeSignals | None:
    """Take SIGTERM as a notice to leave from now on, if this process can."""
    if (
        not isinstance(site, ProcessSite)
        or threading.current_thread() is not threading.main_thread()
    ):
        return None
    signals = NoticeSignals((signal.SIGTERM,), elsewhere="")
    signals.install()
    return signals
