"""The commands of docs/recipes.md as they stand there, also with other packages and hosts.

`make recipes` runs them. Hosts are network namespaces, and pods stand in for a cluster (pods.py).
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from os import killpg
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))

from commands import PHALANX
from launchers import environ_without_launcher
from networks import Network, why_not
from recipes_page import FILES, PAGE, ROOT, same, sections

PATIENCE = 200.0
ENDS = {"preemption.py": [75, 0]}  # the exit codes of a recipe's commands, if not 0
SECTIONS = {section.files[0]: section for section in sections()}
HERE = [name for name, section in SECTIONS.items() if section.runs and name != "two_laptops.py"]
ENVIRON = environ_without_launcher() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TOKEN = {"PHALANX_TOKEN": "a token of many letters"}


def missing(name: str) -> str:
    """What a recipe needs and this machine does not have, or ""."""
    imported = re.findall(r"^from (peft|transformers)\b", FILES[name], flags=re.MULTILINE)
    for package in imported:
        if find_spec(package) is None:
            return f"needs {package}: it is missing"
    if name == "compiled.py" and not (shutil.which("c++") or shutil.which("g++")):
        return "needs a C++ compiler: there is none"
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to run commands in, which begin with examples/."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def start(command: str, folder: Path, *before: str, **environ: str) -> subprocess.Popen[str]:
    """Start a command of the page; `before` it stand other words."""
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, environ[name] = words.pop(0).split("=", 1)
    program = {"phalanx": PHALANX, "python": [sys.executable]}[words[0]]
    return subprocess.Popen(
        [*before, *program, *words[1:]],
        cwd=folder,
        env={**ENVIRON, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(*jobs: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """The exit code, the output and the errors of each. None lives on."""
    try:
        said = [job.communicate(timeout=PATIENCE) for job in jobs]
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                killpg(job.pid, SIGKILL)
            job.wait()
    return [(job.returncode, *each) for job, each in zip(jobs, said, strict=True)]


@pytest.mark.parametrize("name", HERE)
def test_the_commands_of_a_recipe_print_what_the_page_shows(name: str, folder: Path) -> None:
    if missing(name):
        pytest.skip(missing(name))
    codes = ENDS.get(name, [])
    for commands, shown in SECTIONS[name].runs:
        output = ""
        for command in commands:
            [(code, out, err)] = finish(start(command, folder))
            assert code == (codes.pop(0) if codes else 0), out + err
            output += out
        assert same(output, shown), output


def test_the_test_of_ones_own_collective_runs_under_pytest(folder: Path) -> None:
    (command,) = re.findall(r"^python -m pytest .*own_collective.*", PAGE, flags=re.MULTILINE)
    [(code, out, err)] = finish(start(command, folder))
    assert code == 0, out + err
    assert "2 passed" in out


def test_the_trace_of_the_profiled_step_can_be_shown(folder: Path) -> None:
    trace, shows = re.findall(r"^(?:PHALANX_TRACE|phalanx trace).*", PAGE, re.MULTILINE)
    for command in (trace, shows):
        [(code, out, err)] = finish(start(command, folder))
        assert code == 0, out + err
    assert (folder / "runs/recipes/trace/merged.html").exists()


def test_from_pretrained_reads_the_model_that_came_from_the_shards(folder: Path) -> None:
    if missing("hugging_face.py"):
        pytest.skip(missing("hugging_face.py"))
    import torch
    from transformers import AutoModelForCausalLM

    [(commands, shown)] = SECTIONS["hugging_face.py"].runs
    (export,) = re.findall(r"^phalanx checkpoint export .*", PAGE, flags=re.MULTILINE)
    for command in (*commands, export):
        [(code, out, err)] = finish(start(command, folder))
        assert code == 0, out + err
    model = AutoModelForCausalLM.from_pretrained(folder / "runs/recipes/exported")
    tokens = (torch.arange(8 * 16).reshape(8, 16) * 3) % 64
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert same(f"loss {loss:.4f} after 10 steps", shown)


# Hosts ------------------------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[Network]:
    if why_not():
        pytest.skip(why_not())
    with Network(2) as hosts:
        yield hosts


def on_two_hosts(network: Network, commands: list[str], folder: Path) -> str:
    """Run one command on each host; what the first one prints."""
    jobs = [
        start(
            command.replace("laptop-0", network.address(0)),
            folder,
            *("ip", "netns", "exec", network.host(number)),
            **TOKEN,
        )
        for number, command in enumerate(commands)
    ]
    ended = finish(*jobs)
    assert [code for code, _, _ in ended] == [0, 0], ended
    return ended[0][1]


def test_two_laptops_train_one_model(network: Network, folder: Path) -> None:
    [(commands, shown)] = SECTIONS["two_laptops.py"].runs
    out = on_two_hosts(network, commands, folder)
    assert same(out, shown), out


def test_diloco_trains_over_a_link_of_100_megabits(network: Network, folder: Path) -> None:
    for number in (0, 1):
        network.slow_down(number, 100)
    [([command], shown)] = SECTIONS["diloco.py"].runs
    place = "--nnodes 2 --node-rank {} --master laptop-0:29500"
    commands = [command.replace("-n 2", place.format(number)) for number in (0, 1)]
    out = on_two_hosts(network, commands, folder)
    assert same(out, shown), out


def test_the_commands_for_two_hosts_on_one_machine_make_them(folder: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    page = (ROOT / "docs" / "testing.md").read_text()
    [(hosts, job)] = re.findall(r"```console\n(ip netns.*?)```.*?```console\n(.*?)```", page, re.S)
    (folder / "train.py").write_text(
        "import phalanx\nwith phalanx.init() as job:\n    job.print(job.describe())\n"
    )
    launcher = f'phalanx() {{ {shlex.join(PHALANX)} "$@"; }}\n'
    runs = launcher + job.replace("phalanx run", shlex.join([*PHALANX, "run"])) + "wait\n"
    ends = "trap 'ip netns delete host-a; ip netns delete host-b' EXIT\n"
    shell = subprocess.Popen(
        ["bash", "-e", "-c", ends + hosts + runs],
        cwd=folder,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    [(code, out, err)] = finish(shell)
    assert code == 0, out + err
    assert "4 ranks on 2 hosts (2 each): shared memory inside a host, TCP between" in out
    assert "TLS 1.3" in out


def test_pods_go_on_from_the_volume_when_one_has_died(network: Network) -> None:
    from pods import Pods

    from phalanx.ops.clusters.kubernetes import KubernetesJob

    if find_spec("yaml") is None or shutil.which("unshare") is None:
        pytest.skip("needs yaml and unshare: one is missing")
    (command,) = re.findall(r"^phalanx kubernetes (.*) \| kubectl", PAGE, flags=re.MULTILINE)
    assert "--nodes 2 " in command
    assert "--volume saved:/saved kubernetes.py /saved/run" in command
    job = KubernetesJob(
        target="train.py",  # as `Pods` calls the script of the image
        args=("/mnt/run",),  # a folder that this machine has, too
        name="train",
        image="registry/train:1",
        nodes=2,
        ranks=1,
        volumes=("saved:/mnt",),
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="phalanx-pods-")))
        folder.chmod(0o755)
        pods = stack.enter_context(Pods(job, network, folder, FILES["kubernetes.py"]))
        pods.publish()
        for died in (True, False):
            for index in (0, 1):
                pods.start(index)
            codes = [pods.exit_code(index) for index in (0, 1)]
            assert any(codes) == died, pods.log(0) + pods.log(1)
        assert "[rank 0] steps 10 to 19\n" in pods.log(0), pods.log(0)
