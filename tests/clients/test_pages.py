"""The pages of `phalanx watch --web` and `phalanx trace --html`, in Debian's Chromium."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import SHOTS, chromium, focused, lowest_contrast, opened, screenshot, why_not
from commands import PHALANX
from launchers import PATIENCE, environ_without_launcher
from waiting import wait_until

from phalanx.launch.observer import NodePlace, OtherNodes
from phalanx.ops.observe.watch.folder import OTHERS, WatchFolder, open_folder
from phalanx.ops.observe.watch.gather import find_job, follow
from phalanx.ops.observe.watch.state import JobState, RankState
from phalanx.ops.observe.watch.web import serve

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PROGRAM = Path(__file__).with_name("watched_program.py")
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


class Published:
    """A job of which ranks publish, each as it does under any launcher, and its page.

    Rank 1 is the slowest: the others wait for it.
    """

    def __init__(self, folder: WatchFolder, size: int) -> None:
        self.folder, self.size = folder, size
        self.step = 100
        self.address = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def publish(self, rank: int, **changes: Any) -> None:
        state = RankState(
            rank=rank,
            host=f"node{rank // 8}",
            pid=os.getpid(),
            time=time.time(),
            step=self.step,
            step_seconds=0.25,
            operation="" if rank == 1 else "all_reduce",
            sequence=None if rank == 1 else 41,
            signature="" if rank == 1 else "float32 [32], sum",
            where="" if rank == 1 else "train.py:57",
            seconds_in=0.0 if rank == 1 else 0.5,
            waits_for=[] if rank == 1 else [1],
            last_call="broadcast #40 at train.py:9",
            communicating=0.1,
            waiting=0.0 if rank == 1 else 0.8,
            sent=2.0 * (1 << 20),
            received=3.0 * (1 << 20),
            memory=1 << 30,
            log=f"hello from {rank}",
            values={"loss": 2.5},
        )
        for name, value in changes.items():
            setattr(state, name, value)
        part = JobState(
            name="train.py --lr 3", world_size=self.size, time=time.time(), ranks=[state]
        )
        self.folder.write(f"rank-{rank}.json", part)

    def publish_all(self, **changes: Any) -> None:
        self.step += 1
        for rank in range(self.size):
            self.publish(rank, **changes)

    def end(self) -> None:
        over = JobState(
            name="train.py --lr 3",
            world_size=self.size,
            time=time.time(),
            ranks=[RankState(rank=rank, status="ended") for rank in range(self.size)],
            ended="it has ended well",
        )
        self.folder.write("node-0.json", over)

    def _serve(self) -> None:
        def ready(address: str) -> None:
            self.address = address
            self._ready.set()

        period = 0.1 if self.size < 64 else 0.5  # what a browser keeps up with on a busy machine
        serve(follow(find_job(str(self.folder.path)), period=period), 0, ready=ready)

    def __enter__(self) -> Published:
        self.publish_all()
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._thread.join()


@pytest.fixture
def published(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Published]:
    with Published(open_folder(tmp_path / "watch"), getattr(request, "param", 2)) as job:
        yield job


def wait_for_text(page: Any, selector: str, words: str) -> None:
    page.wait_for_function(
        "([selector, words]) => document.querySelector(selector).textContent.includes(words)",
        arg=[selector, words],
    )


def table(page: Any) -> list[dict[str, str]]:
    """The rows of the table of ranks, by heading."""
    headings, *rows = page.evaluate(
        "() => [...document.querySelectorAll('table tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return [dict(zip(headings, row, strict=True)) for row in rows]


# The page of a job ------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [2, 64], indirect=True)
def test_the_page_says_what_each_rank_does_and_which_is_slowest(
    browser: Any, published: Published
) -> None:
    size = published.size
    theme = "light" if size == 2 else "dark"
    with opened(browser, published.address, theme=theme) as page:
        wait_for_text(page, "#summary", "slowest: rank 1")
        assert page.inner_text("h1") == "train.py --lr 3"
        assert page.inner_text("#summary").startswith(f"{size} ranks: {size} running; slowest")
        rows = table(page)
        assert [row["rank"] for row in rows] == [str(rank) for rank in range(size)]
        assert rows[-1] | {"published": "", "reason": ""} == (
            {
                "rank": str(size - 1),
                "status": "running, slowest" if size == 2 else "running",
                "step": "101",
                "step time": "250 ms",
                "call": "(computing)" if size == 2 else "all_reduce #41",
                "for": "" if size == 2 else "500 ms",
                "waits for": "" if size == 2 else "1",
                "waiting": "0 %" if size == 2 else "80 %",
                "communicating": "10 %",
                "reason": "",
                "sent a second": "2.0 MiB",
                "received a second": "3.0 MiB",
                "memory": "1.0 GiB",
                "logged": "loss 2.5",
                "last line": f"hello from {size - 1}",
                "about": "" if size == 2 else "float32 [32], sum",
                "line": "" if size == 2 else "train.py:57",
                "group": "" if size == 2 else "all ranks",
                "last call": "broadcast #40 at train.py:9",
                "host": f"node{(size - 1) // 8}",
                "process": str(os.getpid()),
                "generation": "0",
                "published": "",
            }
        )
        assert [row["status"] for row in rows].count("running, slowest") == 1
        assert "Nothing: no rank is stopped" in page.inner_text("#alerts")
        plots = page.inner_text("#plots")
        for words in ("loss: loss 2.5", "slowest 250 ms", f"sent {2 * size}"):
            assert words in plots
        for second in range(20 if size == 64 and SHOTS in os.environ else 0):
            late = {"waiting": 0.0} if second < 8 else {}  # there is more to see of a longer run
            published.publish_all(sent=(2.0 + second % 3) * (1 << 20), **late)
            page.wait_for_timeout(1000)
        published.publish(0, seconds_in=7.0)
        wait_for_text(page, "#alerts", "rank 0 has waited 7.0 s in all_reduce #41")
        assert page.inner_text("#alerts .cause").startswith("rank 1 computes")
        waiting = "1 rank waits" if size == 2 else f"{size - 1} ranks wait"
        assert page.inner_text("#alerts summary") == waiting
        page.click("#alerts summary")
        assert "-> for rank 1" in page.inner_text("#alerts")
        if size == 64:
            screenshot(page, "watch-64.png")
        published.end()
        wait_for_text(page, "#alerts", "The job has ended: it has ended well")


def test_names_lines_and_reasons_are_text_whatever_is_in_them(
    browser: Any, published: Published
) -> None:
    with opened(browser, published.address) as page:
        published.publish(
            0, log=NASTY, where=NASTY, operation=NASTY, reason=NASTY, values={NASTY: 1.0}
        )
        wait_for_text(page, "#rows", NASTY)
        wait_for_text(page, "#plots", NASTY)
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1


def test_a_keyboard_reaches_and_does_everything(browser: Any, published: Published) -> None:
    with opened(browser, published.address) as page:
        wait_for_text(page, "#summary", "slowest: rank 1")

        def press(key: str) -> str:
            page.keyboard.press(key)
            return focused(page)

        headings = list(table(page)[0])
        path = [press("Tab") for _ in range(4 + len(headings))]
        assert path == ["skip", "pause", "timeline", "scroll", *headings]

        # The table sorts: the largest first, and again the other way.
        page.locator("th button", has_text="waits for").focus()
        page.keyboard.press("Enter")
        assert [row["rank"] for row in table(page)] == ["0", "1"]
        page.keyboard.press(" ")
        assert [row["rank"] for row in table(page)] == ["1", "0"]
        assert focused(page) == "waits for"
        assert page.get_attribute("th:nth-child(7)", "aria-sort") == "ascending"

        # The timeline is read out.
        page.locator("#timeline").focus()
        press("ArrowLeft")
        assert page.inner_text("#readout").startswith("rank 0, ")
        press("ArrowDown")
        assert re.fullmatch(
            r"rank 1, .*: 8\d % computing, 1\d % communicating, 0 % waiting",
            page.inner_text("#readout"),
        )

        # Paused, the page stays as it is, and goes on with what has come meanwhile.
        page.locator("#pause").focus()
        press("Enter")
        assert page.get_attribute("#pause", "aria-pressed") == "true"
        assert "paused at" in page.inner_text("#summary")
        published.publish_all()
        page.wait_for_function("() => held.job.ranks[0].step === 102")
        assert table(page)[0]["step"] == "101"
        press(" ")
        assert table(page)[0]["step"] == "102"
        assert focused(page) == "pause"

        # The link that skips to the table is seen when it has the focus.
        page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
        page.locator(".skip").focus()
        assert page.locator(".skip").bounding_box()["x"] >= 0
        assert press("Enter") == "ranks"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_of_the_page_stands_out(browser: Any, tmp_path: Path, theme: str) -> None:
    with (
        Published(open_folder(tmp_path / "watch"), 4) as published,
        opened(browser, published.address, theme=theme) as page,
    ):
        published.publish(0, seconds_in=7.0, reason="it has published nothing for 7 s")
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        with stopped_process() as stopped:
            published.publish(1, pid=stopped.pid, machine=machine())
            published.publish(2, pid=gone.pid, machine=machine())
            wait_for_text(page, "#alerts", "rank 1 is stopped: process")
            wait_for_text(page, "#alerts", "rank 2 is dead: process")
            other = NodePlace(node=1, host="host1", first_rank=3, ranks=1, reason="no port is left")
            published.folder.write(OTHERS, OtherNodes(token="", nodes=[other]))
            wait_for_text(
                page, "#alerts", "rank 3 is unreachable: node 1 (host1): it cannot listen"
            )
            page.click("#pause")
            contrast, text = lowest_contrast(page)
            assert contrast >= 4.5, text
            background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(255, 255, 255)") == (theme == "light")


def machine() -> str:
    from phalanx.ops.observe.watch.folder import machine as of_this_host

    return of_this_host()


@contextmanager
def stopped_process() -> Iterator[subprocess.Popen[bytes]]:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        os.waitpid(process.pid, os.WUNTRACED)
        yield process
    finally:
        process.kill()
        process.wait()


# The page of a real job -------------------------------------------------------------------------


ALL_PAST = "steps => job && job.ranks.every(rank => rank.step > steps)"


@pytest.fixture(scope="module")
def job_with_a_culprit(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path]:
    """A training on four ranks, of which one is slowed, then stopped, then killed, and its page.

    What the page said of it each time, and the traces of the ranks.
    """
    folder = tmp_path_factory.mktemp("job")
    traces, said = folder / "traces", []
    environ = environ_without_launcher() | {
        "OMP_NUM_THREADS": "1",
        "PHALANX_TRACE": str(traces),
        "PHALANX_HEARTBEAT": "300",  # a stopped rank would end the job
        "PHALANX_WATCH": str(folder / "watch"),
        "WATCHED_FOLDER": str(folder),
    }
    words = [*PHALANX, "run", "-n", "4", PROGRAM.name]
    steps = 300 if SHOTS in os.environ else 5  # there is more to see of a longer run
    with (folder / "log").open("w") as out:
        job = subprocess.Popen(
            words, env=environ, cwd=PROGRAM.parent, stdout=out, stderr=subprocess.STDOUT
        )
    watch = None
    try:
        wait_until(lambda: job.poll() is not None or list((folder / "watch").glob("node-*.json")))
        assert job.poll() is None, (folder / "log").read_text()
        watch = subprocess.Popen(
            [*PHALANX, "watch", str(folder / "watch"), "--web"],
            env=environ_without_launcher(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watch.stdout is not None
        address = watch.stdout.readline().split()[0]
        with opened(browser, address) as page:
            page.wait_for_function(ALL_PAST, arg=steps)

            def look(what: str, words: str, selector: str = "#alerts") -> None:
                began = time.perf_counter()
                if what == "slowed":  # it may have been the slowest before, too
                    page.wait_for_function("() => job.ranks[1].step_seconds >= .2")
                wait_for_text(page, selector, words)
                print(f"{what}: on the page after {time.perf_counter() - began:.2f} s")
                said.append(page.inner_text(selector))

            (folder / "slow").touch()
            look("slowed", "slowest: rank 1", "#summary")
            page.wait_for_function(ALL_PAST, arg=steps + steps // 6)
            (victim,) = [int(row["process"]) for row in table(page) if row["rank"] == "1"]
            os.kill(victim, signal.SIGSTOP)
            look("stopped", "rank 1 is stopped")
            wait_for_text(page, "#alerts", "-> for rank 1")
            page.click("#alerts summary")
            said[-1] = page.inner_text("#alerts")
            screenshot(page, "watch.png")
            os.kill(victim, signal.SIGKILL)
            look("killed", "rank 1 is dead")
            wait_for_text(page, "#alerts", "The job has ended")
            said[-1] = page.inner_text("#alerts")
        assert job.wait(PATIENCE) != 0
        assert watch.wait(PATIENCE) == 0
    finally:
        for process in (watch, job):
            if process is not None:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                process.communicate()
    return said, traces


def test_a_rank_that_is_slow_then_stopped_then_killed_is_on_the_page(
    job_with_a_culprit: tuple[list[str], Path],
) -> None:
    slowed, stopped, killed = job_with_a_culprit[0]
    assert "slowest: rank 1" in slowed
    assert re.search(r"rank 1 is stopped: process \d+ is stopped \(SIGSTOP", stopped)
    assert re.search(r"rank \d has waited [\d.]+ s in all_reduce #\d+ .*watched_program", stopped)
    assert re.search(r"rank 1 is dead: .*SIGKILL", killed)
    assert "The job has ended: " in killed


# The page of a trace ----------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_of_its_trace_names_the_culprit_and_stands_out(
    browser: Any, job_with_a_culprit: tuple[list[str], Path], theme: str
) -> None:
    traces = job_with_a_culprit[1]
    subprocess.run([*PHALANX, "trace", str(traces), "--html"], check=True, capture_output=True)
    with opened(browser, (traces / "merged.html").as_uri(), theme=theme) as page:
        verdict = page.inner_text(".verdict")
        assert "Rank 1" in verdict
        assert "held the others up" in verdict
        assert "of rank 1 there is no part" in verdict
        contrast, text = lowest_contrast(page)
        assert contrast >= 4.5, text
        screenshot(page, f"trace-{theme}.png")


def test_a_keyboard_sorts_the_tables_of_a_trace_and_moves_through_its_picture(
    browser: Any, job_with_a_culprit: tuple[list[str], Path]
) -> None:
    traces = job_with_a_culprit[1]
    subprocess.run([*PHALANX, "trace", str(traces), "--html"], check=True, capture_output=True)
    with opened(browser, (traces / "merged.html").as_uri()) as page:
        for expected in ("skip", "timeline", "scroll", "rank"):
            page.keyboard.press("Tab")
            assert focused(page) == expected
        page.keyboard.press("Enter")
        ranks = page.locator("table").first.locator("tbody tr td:first-child").all_inner_texts()
        assert ranks == ["3", "2", "1", "0"]
        page.locator("#timeline").focus()
        page.keyboard.press("ArrowRight")
        assert re.match(r"rank 0, 0 s to .*: \d+ % computing", page.inner_text("#readout"))
        page.keyboard.press("End")
        page.keyboard.press("ArrowDown")
        assert page.inner_text("#readout").startswith("rank 1, ")
