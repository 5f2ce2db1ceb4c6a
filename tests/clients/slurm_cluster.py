"""A Slurm of two nodes on this machine: the real daemons, each node in a network of its own.

    namespaces      host 0 (10.77.0.1)         host 1 (10.77.0.2)
    daemons         slurmctld, slurmd -N n1    slurmd -N n2
    clients         sbatch, srun, scancel

Each has a mount namespace, in which /etc/hosts knows n1 and n2, and a host name of its own.
Nobody is authenticated (auth/none): nothing outside the namespaces reaches these daemons. Needs
root, and Debian's slurmctld, slurmd and slurm-client; `why_not()` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))

import networks
from networks import Network
from waiting import wait_until

PATIENCE = 120.0  # seconds for anything that another process does
until = partial(wait_until, patience=PATIENCE, pause=0.1)

# A job that is put back into the queue waits there for as long as a credential lives, and a second.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=n1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ReturnToService=2
JobRequeue=1
KillWait=2
InactiveLimit=0
NodeName=n1 NodeAddr=10.77.0.1 CPUs=2
NodeName=n2 NodeAddr=10.77.0.2 CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def why_not() -> str:
    """Why there can be no cluster here, or ""."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "nsenter") if not which(name)]
    if missing:
        return f"{', '.join(missing)} missing (Debian: slurmctld, slurmd, slurm-client)"
    if os.geteuid():
        return "the daemons of Slurm, and namespaces, need root"
    return networks.why_not()


def which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class SlurmCluster:
    """Two nodes with two processors each. `home` is a folder that both see."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.home = folder / "home"
        self._network = network
        self._folder = folder
        self._configuration = folder / "slurm.conf"
        self._hosts = folder / "hosts"
        for name in ("home", "state", "n1", "n2"):
            (folder / name).mkdir()
        self._configuration.write_text(CONFIGURATION.format(folder=folder))
        self._hosts.write_text("127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n")

    @contextmanager
    def running(self) -> Iterator[SlurmCluster]:
        """The daemons run, and both nodes are idle."""
        daemons = [(0, "slurmctld", "-D", "-c"), (0, "slurmd", "-D", "-N", "n1")]
        daemons += [(1, "slurmd", "-D", "-N", "n2")]
        with ExitStack() as stack:
            for host, *words in daemons:
                log = stack.enter_context((self._folder / f"{words[0]}{words[-1]}.out").open("w"))
                process = subprocess.Popen(
                    self._words(host, *words), env=self._environment(), stdout=log, stderr=log
                )
                stack.callback(process.wait)
                stack.callback(process.terminate)
            try:
                self._wait_for_nodes()
                yield self
            finally:
                self.ask("scancel", "--state=PENDING", "--user=root", check=False)
                self.ask("scancel", "--signal=KILL", "--full", "--user=root", check=False)
                with suppress(AssertionError):
                    until(lambda: not self.ask("squeue", "-h", check=False), "no job is left")

    def _wait_for_nodes(self) -> None:
        idle = "idle 2"
        until(lambda: self.ask("sinfo", "-h", "-o", "%T %D", check=False) == idle, "2 nodes idle")

    def _words(self, host: int, *words: str) -> list[str]:
        enter = ["nsenter", f"--net=/run/netns/{self._network.host(host)}", "unshare"]
        enter += ["--mount", "--uts", "sh", "-c", ENTER, "sh", str(self._hosts), f"n{host + 1}"]
        return [*enter, which(words[0]) or words[0], *words[1:]]

    def _environment(self) -> dict[str, str]:
        mine = ("PHALANX_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "SLURM")
        environ = {name: v for name, v in os.environ.items() if not name.startswith(mine)}
        paths = [path for path in sys.path if path.endswith("/src")]
        environ["PYTHONPATH"] = ":".join([*paths, environ.get("PYTHONPATH", "")])
        return environ | {"SLURM_CONF": str(self._configuration), "OMP_NUM_THREADS": "1"}

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        """Start a command on node n1, in `home`."""
        return subprocess.Popen(
            self._words(0, *words),
            env=self._environment() | more,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask(self, *words: str, check: bool = True) -> str:
        """Run a command on node n1, in `home`; return what it printed."""
        process = self.start(*words)
        said, _ = process.communicate(timeout=PATIENCE)
        assert not check or process.returncode == 0, said
        return said.strip()

    def phalanx(self, *words: str) -> str:
        """Run the `phalanx` command on node n1."""
        return self.ask(sys.executable, "-m", "phalanx", *words)

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says about a job: `JobState`, `ExitCode`, `Restarts`, ..."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states; return what Slurm says about it."""
        found: dict[str, str] = {}

        def there() -> bool:
            found.update(self.job(number))
            return found["JobState"] in states

        until(there, f"job {number} is {' or '.join(states)}")
        return found


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster that runs."""
    with Network(2) as network, SlurmCluster(network, folder).running() as cluster:
        yield cluster


def processes(*words: str) -> list[int]:
    """The processes of this machine with this command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().decode(errors="replace").split("\0")[:-1] == list(words):
                found.append(int(path.parent.name))
    return found


def variables(pid: int) -> dict[str, str]:
    """The environment with which a process was started."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def parent(pid: int) -> int:
    """The parent of a process."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text[text.rindex(")") + 2 :].split()[1])


def kill(pid: int) -> None:
    """End a process at once."""
    os.kill(pid, signal.SIGKILL)
