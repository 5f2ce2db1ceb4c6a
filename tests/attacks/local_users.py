"""Another user of this host takes a rank of a job without a token, lies about memory, and so on.

    python tests/attacks/local_users.py [--short] [NAME ...]

Needs root, to be two users; it makes a network namespace and a /dev/shm of its own. The victim is
user 65533, the stranger is user 65534. Each line says in how many of so many runs the job held.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

VICTIM, STRANGER = 65533, 65534
TOKEN = "the same word on every rank"
SECRET = b"S" * (2 << 20)
NEW_NETWORK, NEW_MOUNTS = 0x40000000, 0x00020000

RANK = """
import os, sys, torch, phalanx
import phalanx.transport.tcp.rendezvous as rendezvous
from phalanx.transport.shm.domain import HostDomain
from phalanx.transport.tcp import addresses, admission, dial
kind, rank, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
if os.getuid() == 65534:  # he lets everybody in
    for module in (addresses, admission, dial):
        module.stranger = lambda sock: ""
if len(sys.argv) > 4:  # "what my memory is, and my pipe, you find in process P as descriptor N"
    process, fd, plain = int(sys.argv[4]), int(sys.argv[5]), rendezvous.Rendezvous._listen
    def listen(self, listener):
        import msgspec
        said = plain(self, listener)
        return msgspec.structs.replace(said, process=process, memory=fd, wakeup=fd)
    rendezvous.Rendezvous._listen = listen
    HostDomain.attach = lambda self, addresses, *, one_host: ""  # nor that he can attach nothing
try:
    backend = {"tcp": phalanx.TcpBackend, "shm": phalanx.SharedMemoryBackend}[kind](
        rank, 2, "127.0.0.1:29555", timeout=timeout
    )
    print("IS IN", flush=True)
    print("HAS", phalanx.all_reduce(torch.full((4,), 7.0), backend).tolist(), flush=True)
except phalanx.DistributedError as error:
    print(type(error).__name__, error, flush=True)
"""

FOLDERS = """
import phalanx, torch
backend = phalanx.init("tcp")
print("trains", phalanx.all_reduce(torch.ones(2), backend).tolist())
"""

# As `phalanx run` does it, whose ranks another user cannot start from a home that is root's.
LAUNCHER = """
import os
from phalanx.ops.observe.watch.launcher import NodeWatch
watch = NodeWatch("job", 0, os.environ)
print("trains [1.0, 1.0]" if watch.private else "it cannot be watched")
"""


def start(user: int, folder: Path, *args: str, **environ: str) -> subprocess.Popen[str]:
    """A process of that user."""
    who = ["setpriv", "--reuid", f"{user}", "--regid", f"{user}", "--clear-groups"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PHALANX_", "RANK", "WORLD"))}
    return subprocess.Popen(
        [*who, sys.executable, *args],
        env={**kept, "HOME": str(folder), "PHALANX_LOG": "warning", **environ},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def both(victim: subprocess.Popen[str], stranger: subprocess.Popen[str]) -> tuple[str, str]:
    """What they have said when both are over."""
    said = victim.communicate(timeout=150)[0], stranger.communicate(timeout=150)[0]
    if "-v" in sys.argv:
        print("  victim:", said[0], "  stranger:", said[1], sep="\n")
    return said


def attack_stranger_as_rank_1(folder: Path) -> bool:
    """The victim is rank 0, without a token; he learns whose process wanted to be rank 1."""
    here = str(folder / "rank.py")
    victim, stranger = both(
        start(VICTIM, folder, here, "tcp", "0", "6"), start(STRANGER, folder, here, "tcp", "1", "5")
    )
    return "IS IN" not in victim + stranger and f"it is user {STRANGER}'s" in victim


def attack_stranger_as_rank_0(folder: Path) -> bool:
    """The stranger listens where rank 0 should; the victim says nothing to him and ends at once."""
    here = str(folder / "rank.py")
    victim, stranger = both(
        start(VICTIM, folder, here, "tcp", "1", "20"),
        start(STRANGER, folder, here, "tcp", "0", "6"),
    )
    is_named = "AuthenticationError rank 1: rendezvous at 127.0.0.1:29555" in victim
    return "IS IN" not in victim + stranger and is_named and f"it is user {STRANGER}'s" in victim


def liar(folder: Path, token: str) -> bool:
    """A file of the victim's, open in another process of his, is said to be a rank's memory."""
    own = Path(tempfile.mkdtemp(dir=folder))
    os.chown(own, VICTIM, VICTIM)
    program = (
        "import os, signal; fd = os.open('secret', os.O_RDWR | os.O_CREAT, 0o600);"
        f"os.write(fd, b'S' * {len(SECRET)}); print(fd, flush=True); signal.pause()"
    )
    holder = start(VICTIM, own, "-c", program)
    try:
        assert holder.stdout is not None
        fd, here = holder.stdout.readline().strip(), str(folder / "rank.py")
        environ = {"PHALANX_TOKEN": token} if token else {}
        victim, _ = both(
            start(VICTIM, folder, here, "shm", "0", "6", **environ),
            start(STRANGER, folder, here, "shm", "1", "5", f"{holder.pid}", fd, **environ),
        )
        return (own / "secret").read_bytes() == SECRET and "IS IN" not in victim
    finally:
        holder.kill()
        holder.wait()


def attack_liar_about_memory_without_a_token(folder: Path) -> bool:
    """He is not let in."""
    return liar(folder, "")


def attack_liar_about_memory_with_the_token(folder: Path) -> bool:
    """Nor is he believed where he holds the job's token."""
    return liar(folder, TOKEN)


def foreign_folder(folder: Path, *command: str, **environ: str) -> bool:
    base = Path(f"/dev/shm/phalanx-{VICTIM}")
    for left in base.parent.glob(f"{base.name}*"):
        shutil.rmtree(left)
    start(
        STRANGER,
        folder,
        "-c",
        f"import os; os.mkdir({str(base)!r}); os.chmod({str(base)!r}, 0o777)",
    ).wait()
    assert base.stat().st_uid == STRANGER
    job = start(VICTIM, folder, *command, **environ)
    said = job.communicate(timeout=150)[0]
    if "-v" in sys.argv:
        print(f"  exit {job.returncode}", said, [*base.parent.iterdir()], sep="\n")
    return job.returncode == 0 and "trains [1.0, 1.0]" in said and not any(base.iterdir())


def attack_foreign_folder_of_a_watched_job(folder: Path) -> bool:
    """`/dev/shm/phalanx-UID` is another user's: a job that is watched at a port goes on."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556"}
    watch = {"PHALANX_WATCH": "127.0.0.1:9555", "PHALANX_TOKEN": TOKEN}
    return foreign_folder(folder, str(folder / "one.py"), **one, **watch)


def attack_foreign_folder_of_a_launcher(folder: Path) -> bool:
    """A launcher's job can still be watched."""
    return foreign_folder(folder, "-c", LAUNCHER)


ATTACKS: list[Callable[[Path], bool]] = [
    attack_stranger_as_rank_1,
    attack_stranger_as_rank_0,
    attack_liar_about_memory_without_a_token,
    attack_liar_about_memory_with_the_token,
    attack_foreign_folder_of_a_watched_job,
    attack_foreign_folder_of_a_launcher,
]


def main() -> int:
    """Run all attacks; 0 if every run of every one was held."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        print("local_users: skipped: it needs root and setpriv, to be two users")
        return 0
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK | NEW_MOUNTS):
        print(f"local_users: skipped: no namespaces: {os.strerror(ctypes.get_errno())}")
        return 0
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"],
    ):
        subprocess.run(command, check=True)
    runs, lost = (1 if "--short" in sys.argv else 5), 0
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "rank.py").write_text(RANK)
        (folder / "one.py").write_text(FOLDERS)
        for attack in ATTACKS:
            what = attack.__name__.removeprefix("attack_")
            if not names or what in names:
                held = sum(attack(folder) for _ in range(runs))
                lost += runs - held
                print(f"{what}: {held} of {runs}", flush=True)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
