"""What the words of `phalanx bench` mean, and which of them mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from phalanx.collectives.schedules import COLLECTIVES
from phalanx.errors import BackendUnavailableError, InvalidWorldSizeError, MisuseError
from phalanx.ops.bench.peaks import lacks_peaks
from phalanx.ops.bench.peers import MACHINE, PEERS
from phalanx.ops.bench.request import (
    make_request,
    parse_ranks,
    parse_sizes,
    show_size,
)
from phalanx.ops.bench.start import run_ranks


@pytest.mark.parametrize(
    ("text", "factor", "sizes"),
    [
        ("8", 8, [8]),
        ("16M,8,64K,8", 8, [8, 1 << 16, 1 << 24]),
        ("8..4K", 8, [8, 64, 512, 4096]),
        ("8..5K", 8, [8, 64, 512, 4096, 5120]),
        ("1M..16M", 4, [1 << 20, 1 << 22, 1 << 24]),
        ("8..64,1G", 2, [8, 16, 32, 64, 1 << 30]),
        ("64KiB", 8, [1 << 16]),
        ("8..8", 8, [8]),
    ],
)
def test_sizes_are_lists_and_ranges(text: str, factor: int, sizes: list[int]) -> None:
    assert parse_sizes(text, factor) == sizes


@pytest.mark.parametrize("text", ["", "0", "-8", "8..", "..8", "64..8", "8,,9", "1.5K", "8T", "K"])
def test_what_is_no_size_is_said_to_be_none(text: str) -> None:
    with pytest.raises(MisuseError, match=r"no size|falls"):
        parse_sizes(text)


def test_the_sizes_of_a_range_grow() -> None:
    with pytest.raises(MisuseError, match="--factor 1"):
        parse_sizes("8..64", 1)


def test_sizes_are_shown_as_they_are_requested() -> None:
    shown = ["0", "8", "1000", "1K", "64K", "1M", "256M", "1G"]
    assert [
        show_size(parse_sizes(text)[0]) if text != "0" else show_size(0) for text in shown
    ] == shown


def test_p2p_is_a_ping_pong_and_a_stream() -> None:
    request = make_request(["p2p", "stream"], backends="tcp", sizes="8")
    assert request.operations == ("ping_pong", "stream")


def test_the_machine_is_measured_unless_that_is_not_wanted() -> None:
    request = make_request(["all_reduce"], backends="gloo,tcp,gloo", sizes="8")
    assert request.backends == ("gloo", "tcp", *MACHINE)
    request = make_request(["all_reduce"], backends="gloo", sizes="8", machine=False)
    assert request.backends == ("gloo",)


def test_unusual_circumstances_are_said_in_titles() -> None:
    usual = make_request(["barrier"], backends="tcp", sizes="8")
    assert usual.circumstances == ""
    busy = make_request(["barrier"], backends="tcp", sizes="8", beside=1, back_to_back=True)
    assert busy.circumstances == ", beside 1 busy process, back to back"
    assert msgspec.structs.replace(busy, beside=2).circumstances.startswith(
        ", beside 2 busy processes"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"operations": ["all_redcue"]}, "no operation 'all_redcue'; there are: all_reduce"),
        ({"backends": "tcp,glue"}, "no backend 'glue'; there are: shm"),
        ({"memory": "virtual"}, "no kind of memory 'virtual'"),
        ({"algorithms": "ring,rang"}, "no algorithm 'rang'; there are: auto"),
        ({"optimizer": "adam"}, "no optimizer 'adam'; there are: sgd, adamw, adafactor"),
        ({"backends": ","}, "names nothing"),
        ({"rounds": 0}, "--rounds 0"),
        ({"seconds": 0.0}, "--seconds 0"),
        ({"threads": 0}, "--threads 0"),
        ({"width": -1}, "--width -1"),
        ({"beside": -1}, "--beside -1"),
        ({"peaks": True}, "--peaks is for training steps, ddp and fsdp, and not for all_reduce"),
    ],
)
def test_a_word_that_means_nothing_is_named_with_those_that_do(
    options: dict[str, object], words: str
) -> None:
    given: dict[str, object] = {"operations": ["all_reduce"], "backends": "tcp", "sizes": "8"}
    given |= options
    with pytest.raises(MisuseError, match=words):
        make_request(given.pop("operations"), **given)  # type: ignore[arg-type]


@pytest.mark.skipif(bool(lacks_peaks()), reason="no peaks of memory here")
def test_peaks_are_refused_where_they_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> NoReturn:
        raise FileNotFoundError(path)

    def request_peaks() -> None:
        assert make_request(["ddp", "fsdp"], backends="tcp", sizes="8", peaks=True).peaks

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Path, "write_text", refuse)
        with pytest.raises(MisuseError, match=r"--peaks: .* of Linux: FileNotFoundError"):
            request_peaks()
    request_peaks()
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MisuseError, match="without a launcher"):
        request_peaks()


def test_tuning_times_every_algorithm_of_every_collective_on_phalanx_alone() -> None:
    request = make_request([], backends="tcp,gloo,alone,hybrid", sizes="8", tune=True)
    assert request.operations == tuple(COLLECTIVES)
    assert (request.backends, request.algorithms, request.memories) == (
        ("tcp", "hybrid"),
        ("fixed",),
        ("ordinary",),
    )


@pytest.mark.parametrize(("operations", "backends"), [(["barrier"], "tcp"), ([], "gloo,alone")])
def test_what_has_no_algorithms_cannot_be_tuned(operations: list[str], backends: str) -> None:
    with pytest.raises(MisuseError, match="--tune compares the algorithms"):
        make_request(operations, backends=backends, sizes="8", tune=True)


def test_a_peer_from_outside_can_be_requested_with_its_table() -> None:
    peers = {**PEERS, "again": PEERS["tcp"]}
    request = make_request(["barrier"], backends="again", sizes="8", machine=False, peers=peers)
    assert request.backends == ("again",)
    with pytest.raises(MisuseError, match="no backend 'again'"):
        make_request(["barrier"], backends="again", sizes="8")


def test_ranks_are_numbers_above_one() -> None:
    assert parse_ranks("2, 4,2") == [2, 4]
    for text in ("1", "0", "two", "2,-3", "2.5"):
        with pytest.raises(InvalidWorldSizeError, match="--ranks"):
            parse_ranks(text)


def test_no_room_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    request = make_request(["barrier"], backends="tcp", sizes="8")
    with pytest.raises(BackendUnavailableError, match="set TMPDIR to a folder"):
        next(run_ranks(request, 2))
