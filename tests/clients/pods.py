"""The pods of a manifest, without a cluster: each in namespaces of its own, as a container is.

    network      a host of `Network` (tests/multiprocess/networks.py)
    processes    its command is process 1, and sees no other pod's
    names        its own in /etc/hosts, as the kubelet writes it; those of the others come with
                 `publish()`, as a Service's do
    files        the Secret as the kubelet mounts it (links, root's, the group `fsGroup`), a folder
                 for each claim, a /dev/shm of 64 MiB or as the manifest says
    environment  the container's, and what the controller of the kind sets

Needs root.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from networks import Network
from waiting import wait_until

import phalanx
from phalanx.ops.clusters.kubernetes import KubernetesJob, make_manifest

PATIENCE = 100.0
TOKEN = "0123456789abcdef" * 4

# Run by bash as process 1; the words after are the pod's user, if any, and its command. Every line
# of $MOUNTS is a folder or a file, and where the pod sees it. $OPEN are folders of Python and of
# Phalanx inside of $CLOSED, which only root may enter, as no image has them.
SET_UP = """
set -e
mount --make-rprivate /
hostname "$NAME"
mount -t tmpfs tmpfs /run
mkdir -p /run/secrets/phalanx
mount -t tmpfs -o size="$SHM" tmpfs /dev/shm
for path in $OPEN; do mkdir -p "/run/open$path"; mount --bind "$path" "/run/open$path"; done
if [ -n "$CLOSED" ]; then mount -t tmpfs -o mode=755 tmpfs "$CLOSED"; fi
for path in $OPEN; do mkdir -p "$path"; mount --bind "/run/open$path" "$path"; done
while read -r from to; do mount --bind "$from" "$to"; done <<< "$MOUNTS"
unset NAME SHM MOUNTS OPEN CLOSED
exec "$@"
"""


class Pods:
    """The pods of `job`, by their index, in a `with` statement. `folder` is for any user."""

    def __init__(self, job: KubernetesJob, network: Network, folder: Path, script: str) -> None:
        self.job, self.network, self.folder = job, network, folder
        self.spec = make_manifest(job, TOKEN)[-1]["spec"]
        self.processes: dict[int, subprocess.Popen[str]] = {}
        for name in ("image", "claim"):
            (folder / name).mkdir()
            (folder / name).chmod(0o777)
        (folder / "image" / "train.py").write_text(script)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        for index in range(job.nodes):
            line = f"{network.address(index)} {self.hostname(index)}\n"
            self._hosts(index).write_text("127.0.0.1 localhost\n" + line)
        self._make_secret()

    def hostname(self, index: int) -> str:
        """What a pod is called."""
        return f"{self.job.name}-{'' if self.job.kind == 'job' else 'node-0-'}{index}"

    def publish(self) -> None:
        """From now on pods know each other's names."""
        for index in range(self.job.nodes):
            with self._hosts(index).open("a") as hosts:
                for other in range(self.job.nodes):
                    name = f"{self.hostname(other)}.{self.job.name}"
                    hosts.write(f"{self.network.address(other)} {name}\n")

    def save(self, name: str, text: str) -> None:
        """Put a file onto the volume."""
        (self.folder / "claim" / name).write_text(text)
        (self.folder / "claim" / name).chmod(0o666)

    def start(self, index: int) -> None:
        """Start a pod; once more, if it has ended."""
        pod, container, controller = self._parts()
        binary = str(Path(sys.executable).parent)
        environ = {
            "PATH": f"{binary}:{os.environ['PATH']}",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "JOB_COMPLETION_INDEX": str(index),
            **controller,
            **{each["name"]: each["value"] for each in container.get("env", [])},
        }
        if self.job.kind == "trainjob":
            environ["PET_NODE_RANK"] = str(index)
        command = [re.sub(r"\$\$", "$", word) for word in container["command"]]
        ids = pod.get("securityContext")
        if ids is not None:
            who = f"--reuid={ids['runAsUser']} --regid={ids['runAsGroup']}".split()
            command = ["setpriv", *who, f"--groups={ids['fsGroup']}", *command]
        spaces = "--mount --uts --pid --fork --kill-child --mount-proc"
        apart = ["unshare", *spaces.split(), "bash", "-c", SET_UP, "pod"]
        (self.folder / f"log-{index}").touch()
        with (self.folder / f"log-{index}").open("a") as log:
            self.processes[index] = subprocess.Popen(
                ["ip", "netns", "exec", self.network.host(index), *apart, *command],
                cwd=self.folder / "image",
                env={**environ, **self._mounts(index, pod, container)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )

    def log(self, index: int) -> str:
        """What a pod has written, each time that it was started."""
        return (self.folder / f"log-{index}").read_text()

    def wait_for(self, index: int, text: str) -> None:
        """Wait until a pod has written this."""

        def written() -> bool:
            running = self.processes[index].poll() is None
            there = text in self.log(index)
            assert there or running, self.log(index)
            return there

        wait_until(written, lambda: f"{text!r} is in {self.log(index)}", patience=PATIENCE)

    def exit_code(self, index: int) -> int:
        """Wait until a pod has ended."""
        try:
            return self.processes[index].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pod {index} goes on:\n{self.log(index)}") from None

    def signal(self, index: int, signum: int) -> None:
        """Send a signal to a pod's process 1, as the kubelet does."""
        process = self.processes[index].pid
        [first] = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        os.kill(int(first), signum)

    def follows(self, code: int) -> str:
        """What the controller does when a container ends with that exit code."""
        if code == 0:
            return "Complete"
        if self.job.kind == "trainjob":  # torch-distributed leaves JobSet's default, OnFailure
            return "Restart"
        spec = self.spec
        if self.job.kind == "jobset":
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        for rule in spec["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", []):
                return str(rule["action"])
        return "Count"

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _hosts(self, index: int) -> Path:
        return self.folder / f"hosts-{index}"

    def _make_secret(self) -> None:
        folder = self.folder / "secret" / "..2026_11_23_20_15_04.1"
        folder.mkdir(parents=True)
        file = folder / "token"
        file.write_text(TOKEN)
        file.chmod(0o400)
        if self.job.user is not None:
            file.chmod(0o440)
            os.chown(file, 0, self.job.user)
        (self.folder / "secret" / "..data").symlink_to(folder.name)
        (self.folder / "secret" / "token").symlink_to("..data/token")

    def _mounts(self, index: int, pod: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
        """What `SET_UP` is told."""
        paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        lines = [f"{self._hosts(index)} /etc/hosts", f"{self.folder}/resolv.conf /etc/resolv.conf"]
        shm = "64m"
        for volume in pod["volumes"]:
            if "secret" in volume:
                lines.append(f"{self.folder}/secret {paths[volume['name']]}")
            elif "persistentVolumeClaim" in volume:
                lines.append(f"{self.folder}/claim {paths[volume['name']]}")
            else:
                assert paths[volume["name"]] == "/dev/shm"
                shm = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
        needed = [Path(sys.base_prefix), Path(sys.prefix), *map(Path, phalanx.__path__)]
        closed = [p for path in needed for p in reversed(path.parents) if not p.stat().st_mode & 1]
        return {
            "NAME": self.hostname(index),
            "SHM": shm,
            "MOUNTS": "\n".join(lines),
            "CLOSED": str(closed[0]) if closed else "",
            "OPEN": " ".join(str(p) for p in needed if closed and closed[0] in p.parents),
        }

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
        """The pod's specification, its container's, and what the controller sets."""
        spec, job = self.spec, self.job
        if job.kind != "trainjob":
            if job.kind == "jobset":
                spec = spec["replicatedJobs"][0]["template"]["spec"]
            pod = spec["template"]["spec"]
            return pod, pod["containers"][0], {}
        [patch] = spec["runtimePatches"]
        [patched] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod, trainer = patched["template"]["spec"]["template"]["spec"], spec["trainer"]
        controller = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_MASTER_ADDR": f"{self.hostname(0)}.{job.name}",
            "PET_MASTER_PORT": "29500",
        }
        return pod, {**pod["containers"][0], **trainer}, controller
