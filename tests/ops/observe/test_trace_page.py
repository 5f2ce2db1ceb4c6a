"""`phalanx trace --html` and `--png`: where the ranks' time went, and who is to blame."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from clusters import SharedMemory
from hypothesis import given
from hypothesis import strategies as st
from trace_files import Rank
from typer.testing import CliRunner

from phalanx import Backend, CollectiveTimeoutError, all_reduce
from phalanx.cli.app import app
from phalanx.errors import MisuseError
from phalanx.ops.observe.trace.merged import MergedTrace, merge
from phalanx.ops.observe.trace.page import verdict, write_page, write_picture
from phalanx.ops.observe.trace.profile import BINS, STATES

SECOND = 1e6  # microseconds


def states(merged: MergedTrace, rank: int) -> dict[str, float]:
    """Seconds of each state of a rank."""
    return dict(zip(STATES, merged.profile.ranks[rank].totals(), strict=True))


def step(ranks: list[Rank], number: int, starts: list[float], end: float) -> None:
    """A collective that each rank begins when it can, and that ends at once for all."""
    for rank, start in zip(ranks, starts, strict=True):
        rank.did(number, start * SECOND, for_=(end - start) * SECOND, where="train.py:7")


def a_job(folder: Path, *, of: int = 4, slow: int | None = None, steps: int = 12) -> MergedTrace:
    """Each step takes a second, and a slow rank makes the others wait for 0.4 s of it."""
    ranks = [Rank(folder, rank, of=of) for rank in range(of)]
    for number in range(steps):
        late = number % of if slow is None else slow
        starts = [number + (0.9 if rank == late else 0.5) for rank in range(of)]
        step(ranks, number, starts, number + 1.0)
    return merge(folder)


# Where time goes --------------------------------------------------------------------------------


def test_a_rank_waits_until_the_last_one_has_begun_and_communicates_from_then_on(
    tmp_path: Path,
) -> None:
    ranks = [Rank(tmp_path, rank) for rank in range(2)]
    step(ranks, 0, [0, 0], 1)
    step(ranks, 1, [2, 5], 6)
    step(ranks, 2, [8, 7], 10)
    merged = merge(tmp_path)
    assert states(merged, 0) == pytest.approx(
        {"computing": 1 + 2, "overlapped": 0, "waiting": 3, "communicating": 1 + 1 + 2}
    )
    assert states(merged, 1) == pytest.approx(
        {"computing": 4 + 1, "overlapped": 0, "waiting": 1, "communicating": 1 + 1 + 2}
    )
    first, second = (merged.profile.ranks[rank] for rank in range(2))
    assert (first.waited, first.awaited) == pytest.approx((3, 1))
    assert (second.waited, second.awaited) == pytest.approx((1, 3))


def test_what_a_program_does_while_an_operation_is_under_way_is_overlapped(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank) for rank in range(2)]
    for rank in ranks:  # four seconds, of which the program waits for the last one
        rank.did(0, 0, for_=4 * SECOND, args={"blocked_us": SECOND})
    ranks[0].did(1, 2 * SECOND, for_=1 * SECOND, args={"blocked_us": 0})  # during the first
    ranks[1].did(1, 3.5 * SECOND, for_=6.5 * SECOND, args={"blocked_us": 0})
    merged = merge(tmp_path)
    assert states(merged, 0) == pytest.approx(
        {"computing": 0, "overlapped": 3, "waiting": 0, "communicating": 1}
    )
    assert states(merged, 1)["overlapped"] == pytest.approx(9)
    assert merged.profile.ranks[0].waited == 0, "its program went on"


def test_bins_add_up_to_the_time_of_the_job(tmp_path: Path) -> None:
    profile = a_job(tmp_path, slow=1, steps=7).profile
    assert profile.seconds == pytest.approx(6.5)
    for rank in profile.ranks.values():
        assert sum(rank.totals()) == pytest.approx(6.5)
        for number in range(BINS):
            assert sum(rank.states(number)) == pytest.approx(6.5 / BINS)


def test_between_two_runs_a_rank_is_not_there(tmp_path: Path) -> None:
    for run, at in ((0, 0.0), (5, 5.0)):  # `Rank` starts run k after k seconds
        step([Rank(tmp_path, rank, run=run) for rank in range(2)], 0, [at, at + 1], at + 2)
    assert sum(states(merge(tmp_path), 0).values()) == pytest.approx(4)


def test_the_slowest_collective_is_one_line_with_who_began_it_last(tmp_path: Path) -> None:
    slowest = a_job(tmp_path, slow=2, steps=40).profile.slowest
    assert len(slowest) == 15
    assert {(slow.last, round(slow.late, 6)) for slow in slowest} == {(2, 0.4)}
    assert [slow.seconds for slow in slowest] == sorted((s.seconds for s in slowest), reverse=True)


def test_a_collective_that_a_rank_has_no_part_in_is_told(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank, of=3) for rank in range(3)]
    step(ranks, 0, [0, 0, 0], 1)
    step(ranks[:2], 1, [1, 1], 9)
    merged = merge(tmp_path)
    assert merged.profile.broken == 1
    assert merged.profile.slowest[0].missing == (2,)
    assert states(merged, 0)["waiting"] == pytest.approx(8)
    assert merged.profile.ranks[2].awaited == pytest.approx(16)
    assert verdict(merged).startswith(
        "1 collective did not end on every rank: of rank 2 there is no part."
    )


# The verdict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [2, 4, 64])
def test_a_slow_rank_is_named(tmp_path: Path, of: int) -> None:
    text = verdict(a_job(tmp_path, of=of, slow=1)).replace("\N{NO-BREAK SPACE}", " ")
    assert text.startswith(
        "Rank 1 (a) held the others up: it was last to begin 12 of 12 collectives, and 100 % of"
    )


@pytest.mark.parametrize("of", [2, 4])
def test_nobody_is_named_where_each_is_last_at_times(tmp_path: Path, of: int) -> None:
    assert "no rank stands out" in verdict(a_job(tmp_path, of=of))


def test_nobody_is_named_where_nobody_waits(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank) for rank in range(2)]
    for number in range(3):
        step(ranks, number, [number, number + 0.001], number + 0.1)
    assert verdict(merge(tmp_path)).startswith("Ranks hardly waited for each other")


def test_one_rank_has_nobody_to_wait_for(tmp_path: Path) -> None:
    step([Rank(tmp_path, 0, of=1)], 0, [0], 1)
    assert verdict(merge(tmp_path)) == "There is one rank, which waits for nobody."


# The page ---------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would see of a page: its elements, and its text without scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self.text = ""
        self.source = path.read_text()
        self._open = ""
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style"):
            self.inside.setdefault(self._open, []).append(data)
        else:
            self.text += f"{data} "


def page_of(merged: MergedTrace) -> Page:
    path = merged.path.with_suffix(".html")
    write_page(merged, path)
    return Page(path)


@pytest.mark.parametrize("of", [2, 64])
def test_the_page_has_a_row_for_each_rank_and_marks_the_one_to_blame(
    tmp_path: Path, of: int
) -> None:
    page = page_of(a_job(tmp_path, of=of, slow=1))
    assert "Rank 1 (a) held the others up" in page.text
    assert [attrs.get("class") for tag, attrs in page.tags if tag == "tr"].count("culprit") == 1
    data = json.loads(page.inside["script"][0])
    assert data["ranks"] == list(range(of))
    assert {len(shares) for shares in data["shares"]} == {BINS * len(STATES)}


def test_the_page_fetches_nothing_and_allows_only_its_own_script_and_style(tmp_path: Path) -> None:
    page = page_of(a_job(tmp_path, slow=1))
    fetching = {"src", "srcset", "action", "background", "poster", "data", "style", "onclick"}
    assert not [attrs for _, attrs in page.tags if fetching & set(attrs)]
    assert {attrs["href"] for _, attrs in page.tags if "href" in attrs} == {"#main"}
    assert "link" not in {tag for tag, _ in page.tags}
    assert not re.search(r"url\(|@import|https?:", page.source)
    (policy,) = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    hashed = {
        kind: base64.b64encode(hashlib.sha256(page.inside[kind][-1].encode()).digest()).decode()
        for kind in ("style", "script")
    }
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashed['style']}'; "
        f"script-src 'sha256-{hashed['script']}'"
    )


def test_each_row_of_a_table_has_a_cell_for_each_heading_and_errors_are_shown_if_there_are_some(
    tmp_path: Path,
) -> None:
    merged = a_job(tmp_path, slow=1)
    for error in (None, "it broke"):
        if error is not None:
            Rank(tmp_path, 0, run=1).did(0, 0, args={"error": error})
            merged = merge(tmp_path)
        page = page_of(merged)
        tables = page.source.split("<table")[1:]
        assert len(tables) == 4
        for table in tables:
            for row in re.findall(r'<tr class="[^"]*">.*?</tr>', table):
                assert row.count("<td") == table.count("<th ")
        (section,) = [a for _, a in page.tags if a.get("aria-labelledby") == "errors-title"]
        assert ("hidden" in section) is (error is None)


NASTY = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;\x1b[31m\u202e\x00"


def test_names_and_errors_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    for rank in range(2):
        Rank(tmp_path, rank, host=NASTY).did(
            0, 0, name=NASTY, args={"error": NASTY, "where": NASTY, "group": NASTY}
        )
    page = page_of(merge(tmp_path))
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.text.count("<img src=x onerror=alert(2)>&lt;\\u001b[31m\\u202e\\u0000") >= 5
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page.source)


def test_the_page_of_many_operations_is_as_small_as_that_of_few(tmp_path: Path) -> None:
    sizes = []
    for steps in (20, 1000):
        folder = tmp_path / str(steps)
        folder.mkdir()
        sizes.append(len(page_of(a_job(folder, slow=1, of=2, steps=steps)).source))
    assert sizes[1] < 1.02 * sizes[0]


def test_lines_of_a_program_beyond_a_number_are_put_together(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, of=1)
    for number in range(520):
        rank.did(number, number, args={"where": f"train.py:{number}"})
    kinds = merge(tmp_path).profile.kinds
    assert len(kinds) == 501
    assert kinds["other operations", "", ""].count == 20


@given(
    st.lists(
        st.fixed_dictionaries(
            {"ts": st.floats(allow_nan=False, allow_infinity=False)},
            optional={
                "dur": st.floats(allow_nan=False, allow_infinity=False),
                "cat": st.sampled_from(["collective", "message"]),
                "args": st.fixed_dictionaries(
                    {},
                    optional={
                        "blocked_us": st.floats(allow_nan=False, allow_infinity=False),
                        "group": st.sampled_from(["world", "ranks [0, 7]", "ranks [1]"]),
                        "sequence": st.integers(0, 2),
                        "error": st.text(max_size=5),
                    },
                ),
            },
        ),
        max_size=6,
    )
)
def test_no_event_is_too_strange(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, object]]
) -> None:
    folder = tmp_path_factory.mktemp("strange")
    for number in range(2):
        rank = Rank(folder, number)
        for event in events[number::2]:
            rank.line(**{"ph": "X", "name": "a", **event})  # type: ignore[arg-type]
    merged = merge(folder)
    assert "nan" not in page_of(merged).source


# The picture ------------------------------------------------------------------------------------


def test_the_picture_shows_the_states_of_the_ranks(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    waiting = []
    for of in (1, 8):
        folder = tmp_path / str(of)
        folder.mkdir()
        write_picture(a_job(folder, of=of, slow=0), folder / "merged.png")
        pixels = (image.imread(folder / "merged.png")[:, :, :3] * 255).round().astype(int)
        waiting.append(int((pixels == (0xCF, 0x22, 0x2E)).all(axis=2).sum()))
        assert (pixels == (0x2F, 0x7D, 0x4F)).all(axis=2).sum() > 1000, "computing"
    assert waiting[0] < 200, "one rank waits for nobody: nothing but the legend"
    assert waiting[1] > 10_000


# The command ------------------------------------------------------------------------------------


def command(*words: object) -> str:
    result = CliRunner().invoke(app, ["trace", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output.replace("\n", "")


def test_the_command_writes_both_beside_the_merged_trace_and_replaces_its_own(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    a_job(tmp_path)
    for output in (tmp_path / "mine.json", tmp_path / "mine.json"):
        shown = command(tmp_path, "--html", "--png", "-o", output)
        assert f"{output.with_suffix('.html')}: open it in a browser" in shown
        assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeouts
def test_the_table_and_the_page_say_the_same_of_waits_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte arrives there, so that only the starts of the ranks tell who waited."""

    def work(backend: Backend) -> None:
        if backend.rank == 0:
            backend.send(b"!", 1)
        else:
            backend.recv(bytearray(1), 0)
            with pytest.raises(CollectiveTimeoutError):  # meanwhile rank 0 is in its collective
                backend.recv(bytearray(1), 0, timeout=0.25)
        all_reduce(torch.ones(4), backend)

    monkeypatch.setenv("PHALANX_TRACE", str(tmp_path))
    SharedMemory().run(work, 2)
    result = CliRunner().invoke(app, ["trace", str(tmp_path), "--html"])
    heading, *rows = (line.split() for line in result.output.splitlines()[:3])
    assert heading[3:7] == ["waiting", "s", "communicating", "s"]
    of_page = re.findall(r'<tr class="[^"]*">(.*?)</tr>', (tmp_path / "merged.html").read_text())
    for row, cells in zip(rows, of_page[:2], strict=True):
        *_, waiting, communicating, _, _, _ = re.findall(r'data-value="([^"]*)"', cells)
        assert row[3:5] == [f"{float(seconds):.3f}" for seconds in (waiting, communicating)]
    assert float(rows[0][3]) > 0


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_what_is_not_a_trace_is_not_overwritten_and_nothing_is_written(
    tmp_path: Path, option: str
) -> None:
    pytest.importorskip("matplotlib")
    step([Rank(tmp_path, 0, of=1)], 0, [0], 1)
    mine = tmp_path / f"merged.{option[2:]}"
    mine.write_text("mine")
    with pytest.raises(MisuseError, match=rf"merged\.{option[2:]} is there and not by phalanx"):
        command(tmp_path, option)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "merged.json").exists()
    with pytest.raises(MisuseError, match="give -o a name in"):
        command(tmp_path, option, "-o", tmp_path / f"x.{option[2:]}")


def test_a_picture_without_matplotlib_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step([Rank(tmp_path, 0, of=1)], 0, [0], 1)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MisuseError, match=r"pip install 'phalanx\[plot\]'"):
        command(tmp_path, "--png")
    assert not (tmp_path / "merged.json").exists()
