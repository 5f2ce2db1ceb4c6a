"""The files of `phalanx trace` beside a merged trace: a page (`--html`), a picture (`--png`).

The page is one file, which fetches nothing (`one_page.py`). Its size depends on the number of
ranks, not of operations. The tables do not need the script, which draws and sorts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import MisuseError, name_ranks
from phalanx.files import write
from phalanx.ops.observe.one_page import as_text, assemble, digit
from phalanx.ops.observe.trace.merged import MergedTrace, check_replaceable
from phalanx.ops.observe.trace.profile import BINS, STATES, RankProfile, Slow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MADE_BY = b"phalanx trace"  # among the first bytes of a file; others are not overwritten

_LITTLE = 0.02  # a share of the ranks' time that is not worth a word


def beside(output: Path, suffix: str) -> Path:
    """Return the path of a merged trace's page (".html"), or of its picture (".png").

    Raises `MisuseError` if there can be none.
    """
    option = f"--{suffix[1:]}"
    if suffix == ".png":
        try:
            import matplotlib.figure  # noqa: F401, PLC0415 -- an extra
        except ImportError:
            raise MisuseError(
                "--png: matplotlib is not installed; pip install 'phalanx[plot]', or leave --png "
                "out"
            ) from None
    path = output.with_suffix(suffix)
    if path == output:
        raise MisuseError(f"{option} would write {path}, as -o does: give -o a name in .json")
    check_replaceable(path, _MADE_BY, "not by phalanx trace")
    return path


def _replace(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    try:
        write(str(path), content)
    except OSError as error:
        raise MisuseError(f"{path} cannot be written ({error})") from error


# ------------------------------------------------------------------------------
# The numbers' meaning, in a sentence or two.


def verdict(merged: MergedTrace) -> str:
    """Return the rank with which the others lose time, or that there is none, in words."""
    profile = merged.profile
    present = sum(sum(rank.totals()) for rank in profile.ranks.values())
    waited = sum(rank.waited for rank in profile.ranks.values())
    sentences = []
    if profile.broken:
        ranks = _names(sorted(profile.absent, key=lambda rank: (-profile.absent[rank], rank)))
        sentences.append(
            f"{_counted(profile.broken, 'collective')} did not end on every rank: of {ranks} there "
            "is no part."
        )
    culprit = _culprit(merged)
    if len(profile.ranks) < 2:
        sentences.append("There is one rank, which waits for nobody.")
    elif present and waited < _LITTLE * present:
        sentences.append(
            f"Ranks hardly waited for each other: {_percent(waited, present)} of their time."
        )
    elif culprit is not None:
        share = _percent(culprit.awaited, waited)
        sentences.append(
            f"Rank {culprit.rank} ({culprit.host}) held the others up: it was last to begin "
            f"{culprit.last} of {profile.collectives} collectives, and {share} of all waiting was "
            f"for it."
        )
        sentences.append(f"Ranks waited {_percent(waited, present)} of their time.")
    else:
        sentences.append(
            f"Ranks waited for each other {_percent(waited, present)} of their time, and no rank "
            "stands out: now one is last, now another."
        )
    return " ".join(sentences)


def _culprit(merged: MergedTrace) -> RankProfile | None:
    """Return the rank that the others waited for much longer than for the average one."""
    ranks = merged.profile.ranks.values()
    waited = sum(rank.waited for rank in ranks)
    present = sum(sum(rank.totals()) for rank in ranks)
    most = max(merged.ranks, key=lambda rank: rank.awaited)
    share = most.awaited / waited if waited else 0.0
    average = 1 / len(merged.ranks)
    stands_out = share > min(2 * average, (1 + 2 * average) / 3 + 0.05)
    return most if stands_out and waited >= _LITTLE * present else None


def _names(ranks: Sequence[int]) -> str:
    return name_ranks(ranks[:8]) + (", ..." if len(ranks) > 8 else "")


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    shown = f"{share:.0f}" if share >= 1 or not part else f"{share:.1g}"
    return f"{shown}\N{NO-BREAK SPACE}%"


def _seconds(value: float) -> str:
    if not value:
        return "0"
    if value >= 0.1:
        return f"{value:,.3f} s" if value < 100 else f"{value:,.0f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-4 else f"{value * 1e6:.1f} us"


def _bytes(value: int) -> str:
    if not value:
        return "-"
    power = min(4, max(0, (value.bit_length() - 1) // 10))
    return f"{value / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


# ------------------------------------------------------------------------------
# The page.


def write_page(merged: MergedTrace, path: Path) -> None:
    """Write the page; raise `MisuseError` if that is not possible."""
    profile = merged.profile
    lines = {
        "title": as_text(f"Trace of {_counted(len(merged.ranks), 'rank')}: {merged.path.name}"),
        "merged": as_text(merged.path.name),
        "verdict": as_text(verdict(merged)),
        "tiles": "".join(
            f"<div><dt>{name}</dt><dd>{as_text(value)}</dd></div>" for name, value in _tiles(merged)
        ),
        "notes": "".join(f'<p class="note">Note: {as_text(note)}</p>' for note in merged.notes),
        "ranks": _table(_rank_rows(merged)),
        "slowest": _table(map(_slow_row, profile.slowest)),
        "kinds": _table(_kind_rows(merged)),
        **_errors(merged),
        "data": _data(merged),
    }
    page, _ = assemble(__package__, **lines)
    _replace(path, page.encode())


def _data(merged: MergedTrace) -> str:
    """Return the timeline's data: for each rank and bin, the share of each state."""
    width = merged.profile.seconds / BINS
    shares = []
    for rank in merged.ranks:
        each = (seconds / width for number in range(BINS) for seconds in rank.states(number))
        shares.append("".join(map(digit, each)))
    return json.dumps(
        {
            "ranks": [rank.rank for rank in merged.ranks],
            "states": STATES,
            "bins": BINS,
            "seconds": merged.profile.seconds,
            "shares": shares,
        }
    )


def _tiles(merged: MergedTrace) -> Iterator[tuple[str, str]]:
    of_ranks = (rank.totals() for rank in merged.profile.ranks.values())
    totals = [sum(each) for each in zip(*of_ranks, strict=True)]
    hosts = {rank.host for rank in merged.ranks}
    yield "ranks", f"{len(merged.ranks)} on {_counted(len(hosts), 'host')}"
    yield "time", _seconds(merged.profile.seconds)
    yield "operations", f"{sum(rank.operations for rank in merged.ranks):,}"
    for state, seconds in zip(STATES, totals, strict=True):
        yield state, _percent(seconds, sum(totals))
    yield "overlap", _overlap(totals)
    yield "errors", f"{sum(rank.errors for rank in merged.ranks):,}"


def _overlap(totals: Sequence[float]) -> str:
    """Return the share of the time under way in which the program computed."""
    return _percent(totals[1], sum(totals[1:])) if sum(totals[1:]) else "-"


# The tables, whose headings are in page.html.

_Cell = tuple[str, object, str]  # as HTML; its sort key; "text" for words, "long text" for many


def _table(rows: Iterable[tuple[str, Sequence[_Cell]]]) -> str:
    """Return the rows of a table, which are given as a class and cells."""
    body = []
    for marked, cells in rows:
        shown = "".join(
            f'<td class="{kind}" data-value="{as_text(value)}">{cell}</td>'
            for cell, value, kind in cells
        )
        body.append(f'<tr class="{marked}">{shown}</tr>')
    return "\n".join(body)


def _value(value: str | int, kind: str = "text") -> _Cell:
    return as_text(value), value, kind if isinstance(value, str) else ""


def _time(value: float) -> _Cell:
    return as_text(_seconds(value)), f"{value:.9f}", ""


def _rank_rows(merged: MergedTrace) -> Iterator[tuple[str, list[_Cell]]]:
    culprit = _culprit(merged)
    most = max(rank.awaited for rank in merged.profile.ranks.values()) or 1.0
    for rank in merged.ranks:
        totals = rank.totals()
        cells = [_value(rank.rank), _value(rank.host)]
        cells += [(_bar(STATES, totals, merged.profile.seconds), "", ""), _time(rank.awaited)]
        cells += [(_bar(("waiting",), (rank.awaited,), most), "", "")]
        cells += [_value(rank.last), _time(rank.late)]
        cells += [(as_text(_overlap(totals)), totals[1] / (sum(totals[1:]) or 1.0), "")]
        cells += [_time(seconds) for seconds in totals]
        cells += map(_value, (rank.operations, rank.runs, rank.errors))
        yield "culprit" if rank is culprit else "", cells


def _bar(states: Sequence[str], totals: Sequence[float], whole: float) -> str:
    """Return a picture of a line: the seconds of each state out of `whole`."""
    parts, left = [], 0.0
    for state, seconds in zip(states, totals, strict=True):
        width = 100 * seconds / whole
        parts.append(
            f'<rect class="{state}" x="{left:.2f}" width="{width:.2f}" height="10"><title>{state} '
            f"{_seconds(seconds)}</title></rect>"
        )
        left += width
    inside = "".join(parts)
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f"{inside}</svg>"
    )


def _slow_row(slow: Slow) -> tuple[str, list[_Cell]]:
    last = f"rank {slow.last}" if slow.last >= 0 else f"only rank {slow.first.rank}"
    if slow.missing:
        last = f"no part of {_names(slow.missing)}"
    return "", [
        _time(slow.seconds),
        _value(slow.title),
        _time(slow.first.start / 1e6),
        _value(last),
        _time(slow.late) if slow.last >= 0 else ("-", -1, ""),
        _value(slow.where),
        _value(slow.group, "long text"),
    ]


def _kind_rows(merged: MergedTrace) -> Iterator[tuple[str, list[_Cell]]]:
    kinds = sorted(merged.profile.kinds.items(), key=lambda item: -item[1].seconds)
    for (name, where, group), kind in kinds:
        times = (kind.seconds / kind.count, kind.longest, kind.blocked, kind.waiting)
        cells = [_value(name), _value(where), _value(kind.count), _time(kind.seconds)]
        nbytes = _bytes(kind.bytes), kind.bytes, ""
        yield "", [*cells, *map(_time, times), nbytes, _value(group, "long text")]


def _errors(merged: MergedTrace) -> dict[str, str]:
    errors, in_all = merged.profile.errors, sum(rank.errors for rank in merged.ranks)
    head = "Errors" if in_all == len(errors) else f"The first {len(errors)} of {in_all} errors"
    rows = (
        ("", [_value(rank), _value(name), _value(error, "long text")])
        for rank, name, error in errors
    )
    return {"hidden": "" if errors else "hidden", "errors_title": head, "errors": _table(rows)}


# ------------------------------------------------------------------------------
# The picture: the time of each rank, and how long the others waited for it.

_LINES = 20  # of the picture, for a rank
_COLOURS = dict(zip(STATES, ("#2f7d4f", "#1f6feb", "#cf222e", "#b7791f"), strict=True))


def write_picture(merged: MergedTrace, path: Path) -> None:
    """Write the picture; raise `MisuseError` if that is not possible."""
    from matplotlib.figure import Figure  # noqa: PLC0415 -- an extra

    count = len(merged.ranks)
    figure = Figure(figsize=(11, min(12.0, 3.2 + 0.22 * count)), layout="constrained")
    figure.suptitle(verdict(merged), fontsize="medium", wrap=True)
    left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    _draw_states(left, merged)
    places = range(count)
    right.barh(places, [rank.awaited for rank in merged.ranks], color=_COLOURS["waiting"])
    right.set_xlabel("seconds that others waited for it")
    step = max(1, -(-count // 32))
    left.set_yticks(places[::step], [f"rank {rank.rank}" for rank in merged.ranks[::step]])
    for panel in (left, right):
        panel.grid(visible=True, axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    content = BytesIO()
    figure.savefig(content, dpi=120, metadata={"Software": _MADE_BY.decode()})
    _replace(path, content.getvalue())


def _draw_states(panel: Axes, merged: MergedTrace) -> None:
    """Draw a row for each rank; in each bin, from below, the states' shares."""
    import numpy as np  # noqa: PLC0415 -- comes with matplotlib
    from matplotlib.colors import to_rgb  # noqa: PLC0415

    count, width = len(merged.ranks), merged.profile.seconds / BINS
    image = np.ones((count * _LINES, BINS, 3))
    for place, rank in enumerate(merged.ranks):
        for number in range(BINS):
            line = (place + 1) * _LINES - 1  # between two rows one line is free
            for state, seconds in zip(STATES, rank.states(number), strict=True):
                above = line - round(seconds / width * (_LINES - 1))
                image[max(above, place * _LINES) : line, number] = to_rgb(_COLOURS[state])
                line = above
    extent = (0.0, merged.profile.seconds, count - 0.5, -0.5)
    panel.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    for state in STATES:
        panel.scatter([], [], marker="s", color=_COLOURS[state], label=state)
    panel.set_xlabel("seconds")
