"""Stores for the tests of elastic groups: one in memory, and etcd's own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock

import pytest
from ports import unused_port
from waiting import wait_until

from phalanx.elastic.stores import KeyValueStore
from phalanx.errors import BackendUnavailableError

TOKEN = "a token of many letters"


class MemoryStore(KeyValueStore):
    """A store in this process."""

    name, timeout = "the store in memory", 5.0

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.operations = 0
        self._lock = Lock()

    def get(self, key: str) -> str:
        self.operations += 1
        return self.values.get(key, "")

    def set(self, key: str, value: str) -> None:
        self.operations += 1
        self.values[key] = value

    def compare_set(self, key: str, expected: str, value: str) -> str:
        self.operations += 1
        with self._lock:
            if self.values.get(key, "") == expected:
                self.values[key] = value
            return self.values.get(key, "")

    def close(self) -> None:
        """There is nothing to close."""


class Etcd:
    """Members of etcd, of which each may be killed. `where` is their address for `open_store`."""

    def __init__(self, folder: Path, members: int, opened: ExitStack) -> None:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("there is no etcd here (Debian's package etcd-server)")
        pytest.importorskip("etcd3gw", reason="etcd3gw (the extra `etcd`) is not installed")
        ports = [(unused_port(), unused_port()) for _ in range(members)]
        url = "http://127.0.0.1:{}".format
        cluster = ",".join(f"m{n}={url(peer)}" for n, (_, peer) in enumerate(ports))
        self.where = "etcd://" + ",".join(f"127.0.0.1:{client}" for client, _ in ports)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        for number, (client, peer) in enumerate(ports):
            options = {
                "name": f"m{number}",
                "data-dir": folder / f"m{number}",
                "listen-client-urls": url(client),
                "advertise-client-urls": url(client),
                "listen-peer-urls": url(peer),
                "initial-advertise-peer-urls": url(peer),
                "initial-cluster": cluster,
                "heartbeat-interval": 50,  # ms
                "election-timeout": 500,
                "logger": "zap",
                "log-outputs": folder / f"m{number}.log",
            }
            command = [program, *(f"--{name}={value}" for name, value in options.items())]
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            opened.callback(process.wait)
            opened.callback(process.kill)
            self.processes.append(process)
            self.ports.append(client)

    def leader(self) -> subprocess.Popen[bytes]:
        from etcd3gw.client import Etcd3Client

        for port, process in zip(self.ports, self.processes, strict=True):
            status = Etcd3Client("127.0.0.1", port, api_path="/v3/", timeout=20.0).status()
            if status["leader"] == status["header"]["member_id"]:
                return process
        raise AssertionError("nobody leads")


@contextmanager
def running_etcd(folder: Path, members: int = 1) -> Iterator[Etcd]:
    from phalanx.elastic.stores import EtcdStore

    with ExitStack() as opened:
        etcd = Etcd(folder, members, opened)
        store = EtcdStore(etcd.where, 2.0)

        def answers() -> bool:
            with suppress(BackendUnavailableError):
                store.set("there", "yes")
                return True
            return False

        wait_until(answers, "etcd answers")
        store.close()
        yield etcd
