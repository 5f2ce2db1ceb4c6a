"""docs/symptoms.md: each message that it quotes is provoked here, and has to have these words.

    heading of the page        ->  the grey blocks under it, cut at blank lines
    row of "Other errors"      ->  the code in its second column

`…` on the page is anything. A message that is changed in the package fails here; so does one that
is quoted and that nothing provokes.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from children import said_by_child
from clusters import TOKEN, SharedMemory, loopback_listener
from documents import PAGES, ROOT, blocks
from launchers import RUN, environ_without_launcher
from ports import unused_port
from processes import run_python
from ranks import Job
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DistributedSampler
from typer.testing import CliRunner

import phalanx
from phalanx import Backend, BatchSampler
from phalanx.checkpoint import storage
from phalanx.cli.app import app
from phalanx.collectives.objects import _exchange as exchange
from phalanx.ops.machine import find_threads
from phalanx.transport.tcp.admission import find_token

DOCS = ROOT / "docs"
PAGE = PAGES["docs/symptoms.md"]
REFERENCE = PAGES["docs/reference/errors.md"]
ERRORS = phalanx.errors.__all__
Said = BaseException | str


def sections() -> Iterator[tuple[str, str]]:
    """The headings of the page, and the text of each up to the next one."""
    pieces = re.split(r"^##+ (.+)\n", PAGE, flags=re.MULTILINE)
    yield from zip(pieces[1::2], pieces[2::2], strict=True)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [re.split(r" *\| *", line.strip("| ")) for line in lines]


def quoted() -> dict[str, list[str]]:
    """The messages on the page, each as one line, under its heading or class."""
    found: dict[str, list[str]] = {}
    for heading, text in sections():
        for block in blocks("text", text):
            messages = [" ".join(piece.split()) for piece in block.split("\n\n")]
            found.setdefault(heading, []).extend(messages)
    for error, message, *_ in rows(dict(sections())["Other errors"])[1:]:
        found.update({error.strip("`"): [message.strip("`")]} if message else {})
    return found


def anchor(heading: str) -> str:
    """As the site's own, and GitHub's."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


# What provokes them -----------------------------------------------------------------------------


def simulated(run: Callable[[Backend], object], ranks: int = 2) -> BaseException:
    return raised(lambda: phalanx.simulate(run, ranks, timeout=0.2))


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:
        call()
    return info.value


def logged(call: Callable[[], object]) -> str:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    log = logging.getLogger("phalanx")
    log.addHandler(handler)
    try:
        call()
    finally:
        log.removeHandler(handler)
    return " ".join(texts)


def both_meet(*calls: Callable[[Backend], object]) -> BaseException:
    """Rank 0 makes the first call, rank 1 the second, ..."""
    return simulated(lambda backend: calls[backend.rank](backend), len(calls))


def saves_alone() -> BaseException:
    """What rank 1 is told, which goes on training."""
    told = []

    def train(backend: Backend) -> None:
        model = phalanx.DDP(nn.Linear(3, 1), backend)
        if backend.rank == 0:
            phalanx.save_checkpoint("runs", model=model, step=1)
        else:
            told.append(raised(lambda: model(torch.ones(2, 3)).sum().backward()))

    simulated(train)
    return told[0]


def end_of_an_epoch() -> BaseException:
    def train(backend: Backend) -> None:
        with backend:
            model = phalanx.DDP(nn.Linear(3, 1), backend)
            for _ in range(2 + backend.rank):
                model(torch.ones(2, 3)).sum().backward()

    return simulated(train)


def wait_in_vain(backend: Backend) -> None:
    """Rank 0 in a call that rank 1 does not make."""
    if backend.rank == 0:
        backend.engine.watchdog.warn_after = 0.05
        phalanx.all_reduce(torch.ones(1), backend, timeout=0.4)


def deadline_passes() -> BaseException:
    return raised(lambda: SharedMemory().run(wait_in_vain, 2))


def goes_on_waiting() -> str:
    return logged(deadline_passes)


def nobody_comes() -> BaseException:
    address = f"127.0.0.1:{unused_port()}"
    return raised(lambda: phalanx.TcpBackend(0, 2, address, token=TOKEN, timeout=0.2))


def receive_first(backend: Backend) -> None:
    backend.recv(torch.empty(1), 1 - backend.rank)


def _ends(backend: Backend, number: int, victim: int) -> None:
    """In a process of its own, which the fork server looks up by this name."""
    phalanx.barrier(backend)
    if backend.rank == victim:
        os.kill(os.getpid(), number)
    phalanx.all_reduce(torch.ones(1), backend)


def lost(number: int, ranks: int) -> str:
    """What rank 0 is told if the last rank gets the signal; its first line names the class."""
    with Job(ranks, heartbeat=1.0, kind=phalanx.SharedMemoryBackend) as job:
        outcomes = [job.start(rank, _ends, number, ranks - 1) for rank in range(ranks)]
        how, text = outcomes[0]()
    assert how == "raised"
    assert text.startswith("PeerLostError: ")
    return str(text)


def environ_of_a_script() -> dict[str, str]:
    """That of a shell, with this package, wherever the script runs."""
    return environ_without_launcher() | {"PYTHONPATH": str(Path(phalanx.__file__).parents[1])}


def launched(script: str, *words: str) -> str:
    """What `phalanx run` writes to stderr."""
    Path("train.py").write_text(script)
    words = (*RUN, *words, "train.py")
    return subprocess.run(
        words, env=environ_of_a_script(), capture_output=True, text=True, timeout=60, check=False
    ).stderr


def rank_0_at(port: int) -> BaseException:
    return raised(lambda: phalanx.TcpBackend(0, 2, f"127.0.0.1:{port}", token=TOKEN))


def node_0_at(port: int) -> str:
    return launched("", "--nnodes", "2", "--master", f"127.0.0.1:{port}")


def torchs_store_at(port: int) -> BaseException:
    return raised(lambda: TCPStore("127.0.0.1", port, 1, is_master=True))


def in_use(call: Callable[[int], Said]) -> Said:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return call(taken.getsockname()[1])


def mesh(backend: Backend) -> None:
    phalanx.DeviceMesh(backend, (2, 2), ("data", "tensor"))


def hybrid(backend: Backend) -> None:
    phalanx.FSDP(nn.Linear(4, 4), backend, strategy=phalanx.ShardingStrategy.hybrid(2))


def turned_away(token: str, size: int, *, told: int = 1) -> BaseException:
    """What a rank is told if rank 1 is given these; rank 0 has another token, or a world of two."""
    listener = loopback_listener()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    zero = partial(phalanx.TcpBackend, 0, 2, address, token=TOKEN, timeout=0.4, listener=listener)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(raised, zero)
        error = raised(lambda: phalanx.TcpBackend(1, size, address, token=token, timeout=0.4))
        assert isinstance(waiting.result(), phalanx.CollectiveTimeoutError)
    return error if told == 1 else waiting.result()


def short_token() -> BaseException:
    return raised(lambda: find_token({"PHALANX_TOKEN": "short"}))


def spawn_on_import() -> str:
    Path("train.py").write_text("import phalanx\ndef f(backend): pass\nphalanx.spawn(f, 1)\n")
    return run_python([os.path.abspath("train.py")]).stderr


def other_model(backend: Backend) -> None:
    phalanx.DDP(nn.Linear(3, 1 + backend.rank), backend)


def drifted(backend: Backend) -> None:
    model = phalanx.DDP(nn.Linear(3, 1), backend, check_replicas_every=1)
    if backend.rank == 1:
        nn.init.ones_(model.module.weight)
    model(torch.ones(2, 3)).sum().backward()


class Half(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def unused(backend: Backend) -> None:
    phalanx.DDP(Half(), backend)(torch.ones(2, 3)).sum().backward()


def nan_on_rank_1(backend: Backend, *, skip: bool) -> torch.Tensor | None:
    model = phalanx.DDP(nn.Linear(3, 1), backend, skip_nonfinite=skip)
    inputs = torch.full((2, 3), torch.nan if backend.rank == 1 else 1.0)
    model(inputs).sum().backward()
    return model.module.weight.grad


def skips_a_step() -> str:
    return logged(lambda: phalanx.simulate(partial(nan_on_rank_1, skip=True), 2))


def forks_a_child() -> str:
    (backend,) = phalanx.SimulatedBackend.create_group(1)
    with backend:
        return said_by_child(lambda: phalanx.barrier(backend))


FRESH = """
import sys
import torch
from phalanx.ops.machine import find_room_in_shared_memory
from torch.utils.data import DataLoader

class Large(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return torch.zeros(1 << 20)

if __name__ == "__main__":
    print("doctor:", find_room_in_shared_memory().status, file=sys.stderr)
    sys.modules["torch._dynamo"] = None  # whoever imports it now gets an error
    try:
        torch.optim.SGD([torch.ones(1)], lr=1)
    except ImportError as error:
        print(error, file=sys.stderr)
    list(DataLoader(Large(), num_workers=1, multiprocessing_context="fork"))
"""
LITTLE = "mount -t tmpfs -o size=1m none /dev/shm"  # seen by these processes only


@cache
def can_mount() -> bool:
    words = ["unshare", "-m", "sh", "-c", LITTLE]
    if not shutil.which(words[0]):
        return False
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@cache
def fresh_process() -> str:
    """What a program writes to stderr in a process of its own; if possible, with a little shm."""
    before = ["unshare", "-m", "sh", "-c", f'{LITTLE} && exec "$@"', "-"] if can_mount() else []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "fresh.py")
        script.write_text(FRESH)
        words, environ = [*before, sys.executable, str(script)], environ_of_a_script()
        ended = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    return ended.stderr


def workers_in_a_little_shm() -> str:
    if not can_mount():
        pytest.skip("no mount can be made here: it takes root")
    assert "doctor: warn" in fresh_process()
    return fresh_process()


def save(backend: Backend) -> None:
    model = phalanx.DDP(nn.Linear(3, 1), backend)
    phalanx.save_checkpoint("runs", model=model, step=1, backend=backend, timeout=0.4)


def too_few(backend: Backend) -> None:
    job = phalanx.Elastic(backend, min_ranks=3, max_ranks=3)
    job.keep(model=phalanx.DDP(nn.Linear(3, 1), job.backend))
    next(job.steps(1))


def load(backend: Backend, features: int = 3) -> None:
    model = phalanx.DDP(nn.Linear(features, 1), backend)
    before = model.module.weight.clone()
    try:
        phalanx.load_checkpoint("runs", model=model, backend=backend)
    finally:
        assert torch.equal(model.module.weight, before), "nothing in the model has changed"


def loads_another_model() -> BaseException:
    phalanx.simulate(save, 2)
    return simulated(partial(load, features=4))


def loads_damage() -> BaseException:
    phalanx.simulate(save, 2)
    for file in Path("runs").rglob("*.safetensors"):
        written = bytearray(file.read_bytes())
        written[-1] ^= 1
        file.write_bytes(written)
    result = CliRunner().invoke(app, ["checkpoint", "verify", "runs"])
    assert result.exit_code == 1
    return simulated(load)


def saves_into_a_file() -> BaseException:
    Path("runs").touch()
    return simulated(save)


def saves_beside_another() -> BaseException:
    Path("runs").mkdir()
    with storage.locked("runs", 1.0):
        return simulated(save)


def half_an_object(backend: Backend) -> None:
    mine = bytearray(b"?!" if backend.rank == 1 else b"N")
    exchange("all_gather", mine, backend, list, "", None).run()


def closed(backend: Backend) -> None:
    backend.close()
    phalanx.barrier(backend)


def stopped() -> BaseException:
    """What rank 0 sees when rank 1 fails."""
    seen: list[BaseException] = []

    def see(backend: Backend) -> None:
        try:
            phalanx.send(torch.ones(1), backend, 1)
            phalanx.barrier(backend)
        except BaseException as error:
            seen.append(error)
            raise

    def fail(backend: Backend) -> None:
        phalanx.recv(torch.empty(1), backend, 0)
        raise ValueError("the cause")

    assert isinstance(both_meet(see, fail), ValueError)
    return seen[0]


PROVOKED: Mapping[str, tuple[Callable[[], Said], ...]] = MappingProxyType(
    {
        "Hangs at the end of an epoch": (end_of_an_epoch,),
        "It goes on waiting": (goes_on_waiting,),
        "CollectiveTimeoutError": (deadline_passes,),
        "Rank 1 did not come": (nobody_comes, lambda: turned_away(TOKEN, 3, told=0)),
        "DeadlockError": (lambda: simulated(receive_first),),
        "DesyncError": (saves_alone,),
        "PeerLostError": (
            lambda: lost(signal.SIGKILL, 3),
            lambda: lost(signal.SIGSTOP, 2),
            lambda: launched("import os\nos.kill(os.getpid(), 9)", "-n", "1"),
        ),
        "Address already in use": (
            lambda: in_use(rank_0_at),
            lambda: in_use(node_0_at),
            lambda: in_use(torchs_store_at),
        ),
        "InvalidWorldSizeError, or 1 rank only": (
            lambda: launched(""),
            lambda: turned_away(TOKEN, 3),
            lambda: simulated(mesh, 1),
            lambda: simulated(hybrid, 3),
        ),
        "AuthenticationError": (
            lambda: turned_away("another token of the tests", 2),
            short_token,
        ),
        "MembershipError": (lambda: simulated(too_few),),
        "BackendUnavailableError": (
            lambda: raised(lambda: phalanx.init("nope")),
            lambda: raised(lambda: phalanx.UccBackend(0, 1, "127.0.0.1:1")),
        ),
        "MisuseError: spawn was called by a module": (spawn_on_import,),
        "Ranks start with other parameters": (
            lambda: simulated(other_model),
            lambda: simulated(drifted, 3),
        ),
        "No gradient came": (lambda: simulated(unused),),
        "Gradients are not finite": (skips_a_step,),
        "A step is twice as slow with 4 ranks": (
            lambda: find_threads({"OMP_NUM_THREADS": "8"}, 2).what,
        ),
        "Out of memory": (lambda: raised(lambda: torch.empty(1 << 50)),),
        "/dev/shm is too small": (workers_in_a_little_shm,),
        "Raises in a child": (forks_a_child,),
        "CheckpointNotFoundError": (lambda: simulated(load),),
        "CheckpointMismatchError": (loads_another_model,),
        "CheckpointDamagedError": (loads_damage,),
        "CheckpointIOError": (saves_into_a_file,),
        "CheckpointError": (saves_beside_another,),
        "InvalidRankError": (
            lambda: simulated(lambda b: phalanx.broadcast(torch.ones(1), b, root=5)),
        ),
        "SelfSendError": (lambda: simulated(lambda b: phalanx.send(torch.ones(1), b, b.rank)),),
        "SizeMismatchError": (
            lambda: both_meet(
                lambda b: b.send(torch.ones(2), 1), lambda b: b.recv(torch.empty(3), 0)
            ),
        ),
        "UnsupportedOperationError": (
            lambda: simulated(
                lambda b: phalanx.all_reduce(
                    torch.ones(2, dtype=torch.complex64), b, phalanx.ReduceOp.MAX
                )
            ),
        ),
        "UnsupportedObjectError": (
            lambda: simulated(lambda b: phalanx.broadcast_object({"a": [1, print]}, b)),
        ),
        "MalformedObjectError": (lambda: simulated(half_an_object),),
        "MisuseError": (lambda: simulated(closed),),
        "RankStopped": (stopped,),
    }
)
QUOTED = quoted()


def test_each_message_of_the_page_is_provoked_and_nothing_else() -> None:
    assert {name: len(calls) for name, calls in PROVOKED.items()} == {
        name: len(messages) for name, messages in QUOTED.items()
    }


@pytest.mark.parametrize(
    ("symptom", "number"), [(name, n) for name in QUOTED for n in range(len(QUOTED[name]))]
)
def test_a_message_has_the_words_that_the_page_quotes(
    symptom: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PHALANX_TOKEN", "PHALANX_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    said = PROVOKED[symptom][number]()
    words = [piece.strip() for piece in QUOTED[symptom][number].split("…")]
    assert sum(map(len, words)) >= 20, "too few to be found by"
    pattern = ".*?".join(map(re.escape, words))
    assert re.search(pattern, " ".join(str(said).split()), flags=re.DOTALL), str(said)
    kind = symptom.partition(",")[0]
    if kind in ERRORS and isinstance(said, phalanx.DistributedError | phalanx.RankStopped):
        assert type(said).__name__ == kind


# What else the page says ------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS)
def test_each_error_has_an_entry_and_the_reference_links_to_it(error: str) -> None:
    """Under a heading of its name, or in the table of the others."""
    headings = [h for h, _ in sections() if h.partition(",")[0] == error]
    in_table = [row[0] for row in rows(dict(sections())["Other errors"]) if row[0] == f"`{error}`"]
    assert len(headings) + len(in_table) == 1
    entry = anchor(headings[0]) if headings else "other-errors"
    shown = REFERENCE.split(f"::: phalanx.{error}\n")[1].split(":::")[0]
    assert f"](../symptoms.md#{entry})" in shown
    kind = getattr(phalanx, error)
    if kind not in (phalanx.DistributedError, phalanx.RankStopped):
        assert kind.__doc__.endswith(f"docs/symptoms.md, {error}")


def test_each_link_of_the_page_leads_to_a_heading() -> None:
    for page, target in re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", PAGE):
        text = (DOCS / page).read_text() if page else PAGE
        headings = re.findall(r"^##+ (.+)$", text, flags=re.MULTILINE)
        assert target in {anchor(each) for each in headings}, f"{page}#{target}"


COMMANDS = sorted(
    {
        line.split("=trace ")[-1]
        for block in re.findall(
            r"^```(?:console|bash)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE
        )
        for line in block.splitlines()
    }
)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("phalanx ")])
def test_the_commands_of_the_page_exist(command: str) -> None:
    words = [word for word in command.split()[1:3] if word.isalpha() and word != "trace"]
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output


def test_ss_and_df_show_a_port_and_the_room() -> None:
    (ss, df) = (c for c in reversed(COMMANDS) if not c.startswith("phalanx "))
    if not shutil.which("ss"):
        pytest.skip("ss is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        shown = subprocess.run(
            shlex.split(ss.replace("29500", port)), capture_output=True, text=True, check=True
        ).stdout
    assert f":{port}" in shown
    assert f"pid={os.getpid()}" in shown
    assert (
        "/dev/shm"
        in subprocess.run(shlex.split(df), capture_output=True, text=True, check=True).stdout
    )


INPUTS, TARGETS = torch.randn(7, 3), torch.randn(7, 1)


def gradient(backend: Backend, *, joined: bool) -> torch.Tensor:
    """Of seven samples, however many ranks share them: by `step`, or as a mean of means."""
    model = phalanx.DDP(nn.Linear(3, 1), backend)
    nn.init.ones_(model.module.weight)
    nn.init.zeros_(model.module.bias)
    mine = slice(backend.rank, None, backend.world_size)
    if joined:
        with model.step(len(INPUTS[mine])) as step:
            step.backward((model(INPUTS[mine]) - TARGETS[mine]).square().sum())
    else:
        (model(INPUTS[mine]) - TARGETS[mine]).square().mean().backward()
    return model.module.weight.grad


def test_a_mean_of_means_differs_with_the_number_of_ranks_and_a_step_does_not() -> None:
    (alone,) = phalanx.simulate(partial(gradient, joined=False), 1)
    for ranks in (2, 3, 5):
        for by_means in phalanx.simulate(partial(gradient, joined=False), ranks):
            assert not torch.allclose(by_means, alone, rtol=1e-3)
        for by_step in phalanx.simulate(partial(gradient, joined=True), ranks):
            torch.testing.assert_close(by_step, alone)


def test_torchs_sampler_repeats_a_sample_and_ours_does_not() -> None:
    def seen(backend: Backend) -> list[int]:
        torchs = DistributedSampler(range(5), backend.world_size, backend.rank, shuffle=False)
        ours = BatchSampler.evaluation(5, backend, batch_size=2)
        counts = torch.tensor([len([*torchs]), sum(map(len, ours))])
        return phalanx.all_reduce(counts, backend).tolist()

    assert phalanx.simulate(seen, 2) == [[6, 5]] * 2


def test_the_mean_of_one_ranks_nan_is_nan_on_all_and_a_skipped_step_is_not() -> None:
    for grad in phalanx.simulate(partial(nan_on_rank_1, skip=False), 2):
        assert grad is not None
        assert grad.isnan().all()


def test_a_seed_that_is_the_same_on_each_rank_gives_the_same_numbers() -> None:
    def draw(backend: Backend, by_rank: int) -> list[float]:
        torch.manual_seed(1 + by_rank * backend.rank)
        return phalanx.all_gather(torch.rand(1), backend).tolist()

    assert len({*phalanx.simulate(partial(draw, by_rank=0), 2)[0]}) == 1
    assert len({*phalanx.simulate(partial(draw, by_rank=1), 2)[0]}) == 2


def test_the_first_optimizer_of_a_process_imports_dynamo() -> None:
    assert "import of torch._dynamo halted" in fresh_process()


def test_adamw_has_two_numbers_more_for_each_parameter() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    assert sum(value.numel() for value in state.values() if value.shape == model.weight.shape) == 6
