"""`phalanx run` and `torchrun` over real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from launchers import RUN, environ_without_launcher, hear_signals, run_of_warm_ranks
from ports import unused_port
from processes import run_python
from warm_python import warm_python

from phalanx.launch.nodes import NodeExit
from phalanx.launch.store import connect_store
from phalanx.wire.control import Endpoint

MEET = """
import os, signal, sys
if sys.argv[1:] == ["early"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "1" else signal.pause()
import torch
from phalanx.launch.init import init

with init(timeout=30) as backend:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("DIE_AT") and backend.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    received = torch.empty(1)
    backend.send(torch.tensor([float(backend.rank)]), (backend.rank + 1) % backend.world_size)
    backend.recv(received, (backend.rank - 1) % backend.world_size)
    print(f"{backend.rank} of {backend.world_size} got {received.item():g}")
"""


@pytest.fixture
def environ() -> dict[str, str]:
    """This process's environment, without a launcher or a token."""
    return environ_without_launcher()


def write(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(text)
    return str(script)


def start(words: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words,
        env=environ,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=hear_signals,  # noqa: PLW1509 -- it takes no lock
    )


def finish(*started: subprocess.Popen[str]) -> tuple[list[int], list[str], str]:
    """Exit codes, all lines of output in order of their text, all errors.

    Left out is what a launcher says on a slow machine: that it waits for other nodes.
    """
    outputs = [process.communicate(timeout=60) for process in started]
    lines = sorted(line for out, _ in outputs for line in out.splitlines())
    errors = [line for _, err in outputs for line in err.splitlines(keepends=True)]
    told = "".join(line for line in errors if " waits for node " not in line)
    return [process.returncode for process in started], lines, told


def run(words: list[str], environ: dict[str, str]) -> tuple[int, list[str], str]:
    codes, lines, errors = finish(start(words, environ))
    return codes[0], lines, errors


def test_a_script_runs_as_python_would_run_it(tmp_path: Path, environ: dict[str, str]) -> None:
    script = write(
        tmp_path,
        "import os, sys\n"
        "print(__name__, sys.argv, sys.path[0], os.environ['OMP_NUM_THREADS'])\n"
        "sys.stdout.write('no '); sys.stdout.flush(); sys.stdout.write('end')\n"
        "print('a warning', file=sys.stderr)\n",
    )
    words = ["-n", "7", "--help", "--", "${local_rank}", "$$"]
    code, lines, errors = run(
        [*RUN, "-n", "2", script, *words], {**environ, "OMP_NUM_THREADS": "3"}
    )
    seen = f"__main__ {[script, *words]} {tmp_path} 3"
    assert lines == [f"[rank {rank}] {line}" for rank in (0, 1) for line in (seen, "no end")]
    assert sorted(errors.splitlines()) == ["[rank 0] a warning", "[rank 1] a warning"]
    assert code == 0


@pytest.mark.parametrize(
    ("before", "behind", "said"),
    [
        ([], [], "phalanx: 1 rank, for -n was not given. Two: phalanx run -n 2 {}"),
        ([], ["-np=2"], "phalanx: 1 rank: -np=2 behind {0} is the script's own. Before it: "
                        "phalanx run -n 2 {0}"),
        ([], ["-n2"], "phalanx: 1 rank: -n2 behind {0} is the script's own. Before it: "
                      "phalanx run -n 2 {0}"),
        (["-n", "1"], ["-n", "2"], ""),
    ],
)  # fmt: skip
def test_one_rank_that_nobody_has_asked_for_says_how_to_start_two(
    tmp_path: Path, environ: dict[str, str], before: list[str], behind: list[str], said: str
) -> None:
    script = write(tmp_path, "import sys\nprint(sys.argv[1:])")
    code, lines, errors = run([*RUN, *before, script, *behind], environ)
    assert (code, lines) == (0, [f"[rank 0] {behind}"])
    assert errors.splitlines() == ([said.format(script)] if said else [])


@pytest.mark.parametrize("words", [["-np", "2"], ["--nproc-per-node=2"]])
def test_the_number_of_ranks_has_the_names_of_other_launchers(
    tmp_path: Path, environ: dict[str, str], words: list[str]
) -> None:
    script = write(tmp_path, "print('here')")
    assert run([*RUN, *words, script], environ) == (0, ["[rank 0] here", "[rank 1] here"], "")


def test_the_first_failure_is_told_last_and_the_others_are_stopped(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    script = write(
        tmp_path,
        "import os, pathlib, signal\n"
        "from phalanx.errors import PeerLostError\n"
        "failing = pathlib.Path(__file__).with_name('failing')  # a named pipe\n"
        "rank = os.environ['RANK']\n"
        "if rank == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    signal.pause()\n"
        "if rank == '1':\n"
        "    failing.read_bytes()  # which ends when rank 2 has closed it\n"
        "    raise PeerLostError('rank 2 is lost', peer=2)\n"
        "failing.write_bytes(b'')\n"
        "raise ValueError('on rank 2')\n",
    )
    os.mkfifo(tmp_path / "failing")
    code, lines, errors = run([*RUN, "-n", "3", script], environ)
    told = errors.splitlines()
    assert told[:3] == [
        "rank 2 failed (exit code 1); its traceback:",
        "Traceback (most recent call last):",
        f'  File "{script}", line 12, in <module>',
    ]
    assert told[-1] == "ValueError: on rank 2"
    assert "PeerLostError" not in errors
    assert (code, lines) == (1, [])


def test_every_way_to_fail_leaves_its_report(tmp_path: Path, environ: dict[str, str]) -> None:
    ways = [
        ("import sys\nsys.exit(3)", 3, "rank 0 failed (exit code 3): sys.exit(3) from "),
        (
            "import sys\nsys.exit('words')",
            1,
            "rank 0 failed (exit code 1): sys.exit('words') from ",
        ),
        ("def f(:", 1, "SyntaxError: "),
        ("import os\nos._exit(7)", 7, "rank 0 failed: exit code 7"),
        ("import os\nos.kill(os.getpid(), 9)", 137, "rank 0 was killed by signal 9 (SIGKILL)"),
        ("import os\nos.closerange(3, 99)\n1 / 0", 1, "rank 0 failed: exit code 1; "),
    ]
    started = []
    for number, (text, _, _) in enumerate(ways):
        folder = tmp_path / str(number)
        folder.mkdir()
        started.append(start([*RUN, write(folder, text)], environ))
    for launcher, (_, code, last) in zip(started, ways, strict=True):
        codes, lines, errors = finish(launcher)
        assert (codes, lines) == ([code], [])
        assert errors.splitlines()[-1].startswith(last)


def test_ranks_meet_when_all_are_started_again_after_one_was_killed(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """That they had met before it was killed is so on two nodes, below."""
    words = [*run_of_warm_ranks(), "-n", "2", "--max-restarts", "1"]
    code, lines, errors = run([*words, write(tmp_path, MEET), "early"], environ)
    assert lines == ["[rank 0] 0 of 2 got 1", "[rank 1] 1 of 2 got 0"]
    first, second = errors.splitlines()
    assert first == "rank 1 was killed by signal 9 (SIGKILL); restarting all ranks (1 of 1)"
    assert second.startswith("[rank 0] phalanx: 2 ranks on 1 host: shared memory; rank 0 at ")
    assert code == 0


def test_the_same_script_runs_under_torchrun(tmp_path: Path, environ: dict[str, str]) -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", write(tmp_path, MEET)]
    ended = run_python(words, environ=environ, python=warm_python())
    said = ended.stdout.replace("\n", "").replace("got ", "")
    assert sorted(said) == sorted("0 of 2 11 of 2 0")
    assert ended.returncode == 0


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux, and two cores that this process may use",
)
def test_bound_ranks_run_on_cores_that_no_other_rank_has(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    script = write(
        tmp_path,
        "import os, threading\n"
        "cores = os.sched_getaffinity(0)\n"
        "thread = threading.Thread(target=lambda: cores.update(os.sched_getaffinity(0)))\n"
        "thread.start()\n"
        "thread.join()\n"
        "assert int(os.environ['OMP_NUM_THREADS']) == len(cores)\n"
        "print(*cores)\n",
    )
    environ.pop("OMP_NUM_THREADS", None)
    code, lines, errors = run([*RUN, "-n", "2", "--bind", "cores", script], environ)
    assert (code, errors) == (0, "")
    first, second = ({int(number) for number in line.split()[2:]} for line in lines)
    assert first
    assert second
    assert not first & second


def start_nodes(
    script: str, environ: dict[str, str], *options: str, run: Sequence[str] = RUN
) -> list[subprocess.Popen[str]]:
    """Two nodes of one rank each; the first to start is not the one with the store."""
    master = f"127.0.0.1:{unused_port()}"
    common = [*run, "--nnodes", "2", "--master", master, *options]
    return [start([*common, "--node-rank", str(node), script], environ) for node in (1, 0)]


WITHOUT_TORCH = """
import runpy, sys
sys.executable = {python!r}
try:
    runpy.run_module("phalanx.launch", run_name="__main__", alter_sys=True)
finally:
    assert "torch" not in sys.modules
    print("without torch")
"""


def test_two_nodes_meet_and_meet_again_after_a_rank_was_killed(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """The launcher does without torch."""
    script, run = (
        write(tmp_path, MEET),
        [sys.executable, "-c", WITHOUT_TORCH.format(python=warm_python())],
    )
    nodes = start_nodes(script, {**environ, "DIE_AT": "0"}, "--max-restarts", "1", run=run)
    codes, lines, errors = finish(*nodes)
    met = ["[rank 0] 0 of 2 got 1", "[rank 1] 1 of 2 got 0"]
    assert (codes, lines) == ([0, 0], [*met, *["without torch"] * 2])
    why = "rank 1 was killed by signal 9 (SIGKILL); restarting all ranks (1 of 1)"
    begin = "[rank 0] phalanx: 2 ranks on "
    assert [line for line in errors.splitlines() if not line.startswith(begin)] == [
        why,
        f"the first failure was on another node, 1: {why}",
    ]


def test_a_failure_on_one_node_stops_the_others_and_is_told_there(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    script = write(
        tmp_path,
        "import os, signal\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise ValueError('on rank 1')\n"
        "signal.pause()\n",
    )
    codes, lines, errors = finish(*start_nodes(script, environ))
    assert (codes, lines) == ([1, 1], [])
    assert errors.splitlines()[-2:] == [
        "ValueError: on rank 1",
        "the first failure was on another node, 1: rank 1 failed (exit code 1: ValueError: on "
        "rank 1)",
    ]


def test_a_node_that_cannot_start_its_ranks_ends_the_job(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    script = write(tmp_path, "import signal; signal.pause()")
    master = f"127.0.0.1:{unused_port()}"
    words = [*RUN, "--nnodes", "2", "--master", master]
    few = ["sh", "-c", 'ulimit -n 40 && exec "$@"', "sh"]
    one = start([*few, *words, "-n", "40", "--node-rank", "1", script], environ)
    zero = start([*words, "--node-rank", "0", script], environ)
    codes, lines, errors = finish(one, zero)
    assert (codes, lines) == ([2, 1], [])
    failure, told = errors.splitlines()
    assert failure.startswith("phalanx: the process of rank ")
    assert "cannot be started" in failure
    reason = failure.removeprefix("phalanx: ")
    assert told == f"the first failure was on another node, 1: its launcher failed: {reason}"


def test_an_interrupted_node_ends_the_job(tmp_path: Path, environ: dict[str, str]) -> None:
    script = write(
        tmp_path,
        "import os, signal\n"
        "if os.environ['RANK'] == '1': print('ready', flush=True)\n"
        "signal.pause()\n",
    )
    one, zero = start_nodes(script, environ, "--max-restarts", "1")
    assert one.stdout is not None
    assert one.stdout.readline() == "[rank 1] ready\n"
    one.send_signal(signal.SIGTERM)
    assert finish(one) == ([143], [], "stopped by SIGTERM\n")
    assert finish(zero) == (
        [143],
        [],
        "the first failure was on another node, 1: its launcher was stopped by SIGTERM\n",
    )


def test_a_node_that_is_interrupted_in_a_collective_ends_the_job_as_well(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """The other node's rank may fail before it is told: its error follows from the lost peer."""
    script = write(
        tmp_path,
        "import phalanx\n"
        "backend = phalanx.init('tcp')\n"
        "backend.barrier()\n"
        "if backend.rank == 1: print('ready', flush=True)\n"
        "while True: backend.barrier()\n",
    )
    run = run_of_warm_ranks()
    one, zero = start_nodes(script, environ, "--max-restarts", "1", run=run)
    assert one.stdout is not None
    assert one.stdout.readline() == "[rank 1] ready\n"
    one.send_signal(signal.SIGTERM)
    assert finish(one)[0] == [143]
    codes, _, errors = finish(zero)
    assert codes == [143]
    assert "another node, 1: its launcher was stopped by SIGTERM" in errors
    assert "MisuseError" not in errors


def test_ranks_clean_up_when_the_launcher_is_interrupted(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    fifo = tmp_path / "ranks"
    os.mkfifo(fifo)
    script = write(
        tmp_path,
        "import signal, sys\n"
        "held = open(sys.argv[1], 'w')\n"
        "try:\n"
        "    print('ready', file=held, flush=True)\n"
        "    signal.pause()\n"
        "finally:\n"
        "    print('cleaned up', file=held, flush=True)\n",
    )
    launcher = start([*RUN, "-n", "1", script, str(fifo)], environ)
    with fifo.open() as ranks:
        assert ranks.readline() == "ready\n"
        launcher.send_signal(signal.SIGINT)
        left = ranks.read()  # its end is theirs
    assert finish(launcher) == ([130], [], "stopped by SIGINT\n")
    assert left == "cleaned up\n"


def test_no_word_of_another_makes_a_launcher_end_well_or_does_anything_to_a_terminal(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """One that holds the token says that the job has failed with exit code 0, in colours."""
    script = write(
        tmp_path,
        "import os, signal\n"
        "if os.environ['RANK'] == '1': print('ready', flush=True)\n"
        "signal.pause()\n",
    )
    token, port = "a token of many letters", unused_port()
    words = [*RUN, "--nnodes", "2", "--master", f"127.0.0.1:{port}"]
    environ["PHALANX_TOKEN"] = token
    one, zero = (start([*words, "--node-rank", node, script], environ) for node in "10")
    assert one.stdout is not None
    assert one.stdout.readline() == "[rank 1] ready\n"
    place, deadline = Endpoint("127.0.0.1", port), time.monotonic() + 20
    with closing(connect_store(place, token, deadline, job="phalanx")) as store:
        said = NodeExit(1, True, "\x1b[31mred\x1b]0;title\x07", code=0, final=True)
        store.add("phalanx/log/0", 1)
        store.set("phalanx/log/0/1", msgspec.json.encode(said))
        codes, lines, errors = finish(one, zero)
    assert (codes, lines) == ([1, 1], [])
    assert "red" in errors
    assert "\x1b" not in errors


def test_nodes_with_different_tokens_do_not_meet(tmp_path: Path, environ: dict[str, str]) -> None:
    script, port = write(tmp_path, "pass"), unused_port()
    words = [*RUN, "--nnodes", "2", "--master", f"127.0.0.1:{port}"]
    zero, one = (
        start([*words, "--node-rank", node, script], {**environ, "PHALANX_TOKEN": node * 32})
        for node in "01"
    )
    codes, lines, errors = finish(one)
    zero.send_signal(signal.SIGTERM)
    assert finish(zero)[0] == [143]
    assert (codes, lines) == ([2], [])
    assert "do not hold the same token (PHALANX_TOKEN, on all or none)" in errors
