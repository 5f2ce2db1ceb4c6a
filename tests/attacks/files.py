"""Files that somebody else has made, or has put where ours belong.

    python tests/attacks/files.py [--short]

Each attack is made in a folder of its own, beside a folder of the victim's that has nothing to do
with it. Whatever is called has to end with an error that names the file (or, where that is said, to
do what it is for), within a second of the processor's time and 64 MiB of memory, without a control
character in its text, and with the victim's folder as it was: names, contents, owners, times. What
waits for ever is woken after 20 seconds, and has failed.

Prints a line for each kind of attack, `NAME: K of N`; ends with 1 if K < N anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from xxhash import xxh3_64_hexdigest

import phalanx
from phalanx.cli.app import app

SECONDS = 1.0  # of the processor
MEMORY = 64 << 20
FOREVER = 20
STRANGER = 54321  # a user's number
DEEP = 100_000
OURS = (phalanx.CheckpointError, phalanx.MisuseError)


class Place:
    """Where an attack is made: `runs` with a checkpoint, and `victim`, which stays as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.victim = folder / "victim"
        self.victim.mkdir()
        for name in ("keys", "chapter-1.tex", "manifest.json", "commit.json", "begun"):
            (self.victim / name).write_text("years of work\n" * 3)
        self.model = nn.Linear(4, 4)
        torch.manual_seed(0)

    def save(self, step: int = 1, **more: Any) -> Path:
        return Path(phalanx.save_checkpoint(self.runs, model=self.model, step=step, **more).wait())

    def load(self) -> Any:
        return phalanx.load_checkpoint(self.runs, model=self.model)

    def pretrained(self) -> None:
        phalanx.load_pretrained(self.runs, self.model)

    def command(self, *words: str | Path) -> str:
        """What a command of `phalanx` prints; raises what it raises."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            app([*map(str, words)], standalone_mode=False)
        return said.getvalue()


Attempt = Callable[[], object]
Attack = Callable[[Place], Attempt]


class Attacked(NamedTuple):
    """An attack, and whether what is called has to be refused, or has to work, or may do either."""

    name: str
    attack: Attack
    expected: str = "refused"


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """All that is in a folder."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        regular = stat.S_ISREG(status.st_mode)
        content = path.read_bytes() if regular else os.readlink(path) if path.is_symlink() else ""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_ino, content)
        if regular:
            found[str(path)] += (status.st_mtime_ns,)
    return found


def memory(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) << 10
    raise LookupError(what)


class StillWaits(BaseException):
    """Nothing that is called takes it for an error of its own."""


def wake(signum: int, frame: FrameType | None) -> None:
    raise StillWaits(f"after {FOREVER} s")


def disk_for(name: str) -> str | None:
    """Memory, whose fsync takes no time; there, as a rule, devices are none."""
    return None if "device" in name or not os.access("/dev/shm", os.W_OK) else "/dev/shm"


def problem_of(attacked: Attacked) -> str:
    """Make an attack; what it has achieved, or nothing."""
    with tempfile.TemporaryDirectory(prefix="attack-", dir=disk_for(attacked.name)) as name:
        place = Place(Path(name).resolve())
        attempt = attacked.attack(place)
        before, victim = memory("VmRSS"), tree(place.victim)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        signal.signal(signal.SIGALRM, wake)
        signal.alarm(FOREVER)
        begin, text = time.process_time(), ""
        try:
            attempt()
        except OURS as error:
            text = str(error)
        except BaseException as error:
            return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        finally:
            signal.alarm(0)
            seconds, more = time.process_time() - begin, memory("VmHWM") - before
        problems = {
            "the victim's folder has changed": not place.victim.exists()
            or tree(place.victim) != victim,
            f"it took {seconds:.1f} s": seconds > SECONDS,
            f"it took {more >> 20} MiB": more > MEMORY,
            "there is no error": attacked.expected == "refused" and not text,
            f"it does not work: {text}": attacked.expected == "works" and text,
            f"its text does not name the file: {text!r}": text and name not in text,
            f"its text has control characters: {text!r}": not text.isprintable(),
        }
    return next((problem for problem, is_one in problems.items() if is_one), "")


# ------------------------------------------------------------------------------
# The records of a checkpoint, and headers of safetensors files


def records(checkpoint: Path, text: str | bytes, **commit: Any) -> None:
    """Make this the manifest, and the commit record one that vouches for it."""
    content = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    (checkpoint / "manifest.json").write_bytes(content)
    record = {"version": 1, "step": 1, "bytes": len(content), "xxh3": xxh3_64_hexdigest(content)}
    text = json.dumps({**record, **commit}, indent=1)
    (checkpoint / "commit.json").write_text(text)


def manifest(change: Callable[[dict[str, Any]], object], **commit: Any) -> Attack:
    """A checkpoint whose manifest has been changed."""

    def attack(place: Place) -> Attempt:
        checkpoint = place.save(extra={"a": torch.ones(3)})
        read = json.loads((checkpoint / "manifest.json").read_text())
        change(read)
        records(checkpoint, json.dumps(read, indent=1), **commit)
        return place.load

    return attack


def extra(text: str) -> Attack:
    """A checkpoint with this in place of `extra`."""

    def attack(place: Place) -> Attempt:
        checkpoint = place.save(extra="HERE")
        read = (checkpoint / "manifest.json").read_text()
        records(checkpoint, read.replace('"HERE"', text))
        return place.load

    return attack


def weights(text: str | bytes, announced: int | None = None, data: int = 80) -> Attack:
    """A `model.safetensors` with this header."""

    def attack(place: Place) -> Attempt:
        place.runs.mkdir()
        header = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
        length = len(header) if announced is None else announced
        content = length.to_bytes(8, "little") + header + bytes(data)
        (place.runs / "model.safetensors").write_bytes(content)
        return place.pretrained

    return attack


def index(text: str) -> Attack:
    def attack(place: Place) -> Attempt:
        place.runs.mkdir()
        (place.runs / "model.safetensors.index.json").write_text(text)
        return place.pretrained

    return attack


WEIGHT = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
BIAS = {"dtype": "F32", "shape": [4], "data_offsets": [64, 80]}
HEADER = {"weight": WEIGHT, "bias": BIAS}
BIG = "9" * 3999


def large_block(read: dict[str, Any]) -> None:
    for file in read["files"]:
        file.update(bytes=200 << 30, block=200 << 30, checksums="0" * 16)


def with_fields(**fields: Any) -> Attack:
    return manifest(lambda read: read.update(fields))


def named(name: str) -> Attack:
    return manifest(lambda read: read["files"][0].update(name=name))


def many_pieces(read: dict[str, Any]) -> None:
    record = read["state"]["extra.a"]
    file, at, *_ = record["pieces"][0]
    record["pieces"] = [[file, at, 3 * i, 3 * i + 3] for i in range(100_000)]
    record["shape"] = [300_000]


def escapes(read: dict[str, Any]) -> None:
    read["model"]["\x1b]0;PWNED\x07\x1b[31mw"] = dict(read["model"]["weight"], pieces=[])
    read["phalanx"] = "1\x1b[2J"


def sparse(place: Place) -> Attempt:
    checkpoint = place.save(extra={"a": torch.ones(3)})
    read = json.loads((checkpoint / "manifest.json").read_text())
    large_block(read)
    for file in read["files"]:
        os.truncate(checkpoint / file["name"], 200 << 30)
    records(checkpoint, json.dumps(read))
    return place.load


def sparse_tensor(place: Place) -> Attempt:
    """A tensor of 4 TB, in a hole."""
    checkpoint = place.save(extra={"a": torch.ones(3)})
    read = json.loads((checkpoint / "manifest.json").read_text())
    number, at, *_ = read["state"]["extra.a"]["pieces"][0]
    file, count = read["files"][number], 1 << 40
    file.update(bytes=at + 4 * count, block=1 << 26)
    file["checksums"] = "0" * 16 * -(-file["bytes"] // file["block"])
    read["state"] = {**read["state"], "extra.a": dict(read["state"]["extra.a"])}
    read["state"]["extra.a"].update(shape=[count], pieces=[[number, at, 0, count]])
    read["state"] = {n: r for n, r in read["state"].items() if n != "rng/0"}
    read["rng"] = ["extra.a"]
    os.truncate(checkpoint / file["name"], file["bytes"])
    records(checkpoint, json.dumps(read))
    return place.load


def sparse_file(name: str) -> Attack:
    def attack(place: Place) -> Attempt:
        checkpoint = place.save()
        os.truncate(checkpoint / name, 1 << 40)
        return place.load

    return attack


def sparse_weights(place: Place) -> Attempt:
    place.runs.mkdir()
    (place.runs / "model.safetensors").write_bytes((31 << 20).to_bytes(8, "little"))
    os.truncate(place.runs / "model.safetensors", 1 << 40)
    return place.pretrained


def dcp(place: Place) -> Attempt:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {place.victim}/PWNED",)

    place.runs.mkdir()
    (place.runs / ".metadata").write_bytes(pickle.dumps(Evil()))
    return lambda: place.command("checkpoint", "import", place.runs, place.folder / "out")


def inspected(change: Callable[[dict[str, Any]], object], *words: str) -> Attack:
    """What `phalanx checkpoint` prints of a checkpoint that has been changed."""

    def attack(place: Place) -> Attempt:
        manifest(change)(place)

        def attempt() -> None:
            said = place.command("checkpoint", words[0], place.runs, *words[1:])
            assert said.replace("\n", "").isprintable(), repr(said)

        return attempt

    return attack


def escapes_everywhere(read: dict[str, Any]) -> None:
    escapes(read)
    read["torch"] = "2\x1b[2J\u202e"
    read["extra"] = {"\x1b[5mkey": 1, "\x07": 2}
    read["aliases"] = {"\x1b[6n": "weight"}
    read["values"] = {"\x1b[0c": "\x1bP+q\x1b\\"}
    read["optimizer"] = {
        "kind": "\x1b[31mAdam",
        "groups": [
            {"parameters": ["weight"], "options": {"\x1blr": "\x9b2J", "b": {"$x": "\x1b"}}}
        ],
        "state": {"weight": {"\x1b[1mstep": {"value": "\x1b"}}},
        "shared": {},
    }
    empty = {"dtype": "float32", "shape": [0], "pieces": []}
    read["model"]["\x1b]0;PWNED\x07\x1b[31mw"] = empty


def tuning(content: bytes) -> Attack:
    def attack(place: Place) -> Attempt:
        (place.folder / "tuning").write_bytes(content)
        return lambda: tuned(place.folder / "tuning")

    return attack


def tuned(path: Path) -> None:
    os.environ["PHALANX_TUNING"] = str(path)
    try:
        phalanx.simulate(lambda backend: phalanx.all_reduce(torch.ones(4), backend), 2)
    finally:
        del os.environ["PHALANX_TUNING"]


TABLE = (
    '{"format":"phalanx tuning 1","tables":[{"backend":"TcpBackend","hosts":[0,0],'
    '"collective":"all_reduce","sizes":[%s],"seconds":{"ring":[%s]}}]}'
)
VALUES = (
    *('{"$int": 5}', '{"$int": "0xg"}', '{"$float": "abc"}', '{"$bytes": "%%"}', '{"$tensor": 5}'),
    *('{"$tuple": 5}', '{"$dict": [[[], 1]]}', '{"$dict": 7}', '{"$dict": [[1]]}'),
    *('{"$tensor": ["x"]}', '{"$tensor": {"a": 1}}', '{"$tensor": "\\u001b[2J"}', BIG),
    *('{"$dict": [[{"$tensor": "no"}, 1]]}', str(2**63), str(-(2**63) - 1)),
)


def attack_contents() -> Iterator[Attacked]:
    """Records and headers that were written to do harm."""

    def weight(**fields: Any) -> Attack:
        return manifest(lambda read: read["model"]["weight"].update(fields))

    def piece(*pieces: list[int]) -> Attack:
        return weight(pieces=[list(each) for each in pieces])

    alike = [[{"$int": hex(i * (2**61 - 1))}, 0] for i in range(1, 40_001)]
    signs = [[{"$tuple": [-1 - (i >> k & 1) for k in range(16)]}, 0] for i in range(1 << 14)]
    yield Attacked("extra, 900 levels", extra("[" * 900 + "]" * 900))
    yield Attacked("extra, 100,000 levels", extra("[" * DEEP + "]" * DEEP))
    yield Attacked("one block of 200 GB, sparse", sparse)
    often = manifest(lambda read: read.update(extra=[{"$tensor": "extra.a"}] * 300_000))
    yield Attacked("300,000 references to a tensor", often)
    yield Attacked("100,000 pieces of one place", manifest(many_pieces))
    yield Attacked("300,000 dimensions", weight(shape=[2**62] * 300_000))
    yield Attacked("64 dimensions", weight(shape=[2**62] * 64))
    numbers = f"[{', '.join([BIG] * 4000)}]"
    header = weights(json.dumps(HEADER).replace("[4, 4]", numbers))
    yield Attacked("numbers of 4,000 digits in a header", header)
    of_manifest = mutated(("model", "weight", "shape"), numbers)
    yield Attacked("numbers of 4,000 digits in a manifest", of_manifest)
    yield Attacked("a header of 100 MB", weights(b'{"a":' + b"[" * 20 + b"{}," * 33_000_000))
    yield Attacked("a header of 30 MB", weights(b'{"a":' + b"[" * 20 + b"{}," * 10_000_000))
    yield Attacked("a header of 2^63 bytes", weights("{}", 2**63))
    before = json.dumps({"weight": {**WEIGHT, "data_offsets": [-64, 0]}, "bias": BIAS})
    yield Attacked("a place before the file", weights(before))
    for file in ("../x", "/etc/x", "a\\u0000", "\\ud800", "\\u001b[2J", "x" * 5000):
        text = f'{{"weight_map": {{"weight": "{file}.safetensors"}}}}'
        yield Attacked(f"index: {file[:20]}", index(text))
    for file in ("../model-00000-of", "\x1b[2Jmodel-00000-of", f"model-{'9' * 5000}-of"):
        yield Attacked(f"a file named {file[:20]!r}", named(f"{file}-00001.safetensors"))
    yield Attacked("a negative place", piece([0, -8, 0, 16]))
    yield Attacked("a negative shape", weight(shape=[-4, -4]))
    yield Attacked("one place for three pieces", piece(*[[0, 160, 0, 16]] * 3))
    yield Attacked("a hole", piece([0, 160, 0, 8], [0, 196, 9, 16]))
    yield Attacked("NaN", mutated(("step",), "NaN"))
    yield Attacked("1e0", mutated(("world_size",), "1e0"))
    yield Attacked("aliases that make a circle", manifest(
        lambda read: read.update(aliases={"weight": "weight", "bias": "weight"})))  # fmt: skip
    yield Attacked("an alias of nothing", manifest(
        lambda read: read.update(aliases={"w": "\x1b[2Jnothing"})))  # fmt: skip
    yield Attacked(
        "random state: another tensor", manifest(lambda read: read.update(rng=["extra.a"]))
    )
    yield Attacked("random state: none", manifest(lambda read: read.update(rng=["nothing"])))
    for value in VALUES:
        yield Attacked(f"value {value[:30]}", extra(value))
    yield Attacked("40,000 keys of one hash", extra(json.dumps({"$dict": alike})))
    yield Attacked("16,384 tuples of one hash", extra(json.dumps({"$dict": signs})))
    yield Attacked("a pickle", dcp)
    yield Attacked("escapes in an error", manifest(escapes))
    for words in (("inspect",), ("inspect", "--all"), ("inspect", "--json"), ("verify",)):
        yield Attacked(f"escapes: {words}", inspected(escapes_everywhere, *words), "works")
    groups = [{"parameters": [], "options": {"a": nested(900)}}]
    deep = {"kind": "x", "groups": groups, "state": {}, "shared": {}}
    inspect = inspected(lambda read: read.update(optimizer=deep), "inspect")
    yield Attacked("options of 900 levels, inspected", inspect)
    contents = [b"", b"[" * DEEP, b"\xff", b"{}", b'{"format": "\x1b[2J", "tables": []}']
    contents += [(TABLE % said).encode() for said in (("1", "1e999"), ("9" * 5000, "1"))]
    for content in contents:
        yield Attacked(f"tuning {content[:20]!r}", tuning(content))


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


# ------------------------------------------------------------------------------
# What is no regular file, or leads elsewhere


LEADS_TO = {
    "link": "{victim}/keys",
    "link to a link": "other",
    "link to itself": "{itself}",
    "link to nothing": "{victim}/nothing",
    "link to a folder": "{victim}",
    "link to a device": "/dev/zero",
}
NO_FILES = ("fifo", "folder", "socket", "device", *LEADS_TO)


def put(what: str, path: Path, place: Place) -> None:
    """Something else at a path, in place of what is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if what in LEADS_TO:
        path.symlink_to(LEADS_TO[what].format(victim=place.victim, itself=path.name))
    match what:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
                one.bind(path.name)
        case "device":
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
        case "link to a link":
            (path.parent / "other").symlink_to(place.victim / "keys")
        case "second name":
            os.link(place.victim / "keys", path)
        case "stranger's":
            path.write_text("")
            os.chown(path, STRANGER, STRANGER)


NAMES = ("commit.json", "manifest.json", "model-00000-of-00001.safetensors")
NAMES += ("state-00000-of-00001.safetensors",)


def attack_loading() -> Iterator[Attacked]:
    """Something that is no file of a checkpoint, at each of its names."""

    def at(name: str, what: str, command: str = "") -> Attack:
        def attack(place: Place) -> Attempt:
            checkpoint = place.save(extra={"a": torch.ones(3)})
            put(what, checkpoint / name, place)
            if not command:
                return place.load
            out = [place.folder / "out", "--format", command] if command in ("hf", "dcp") else []
            word = "export" if out else command
            return lambda: place.command("checkpoint", word, place.runs, *out)

        return attack

    for name in NAMES:
        for what in (*NO_FILES, "second name"):
            yield Attacked(f"{name}: {what}", at(name, what))
        yield Attacked(f"{name}: inspect", at(name, "fifo", "inspect"), "either")
        for command in ("hf", "dcp"):
            yield Attacked(f"{name}: export {command}", at(name, "fifo", command), "either")
    for name in (*NAMES[:2], NAMES[3]):
        yield Attacked(f"{name}: sparse", sparse_file(name))
    yield Attacked("a tensor of 4 TB", sparse_tensor)

    def hard_linked(place: Place) -> Attempt:  # as backups are: `cp -al`
        checkpoint = place.save()
        for path in list(checkpoint.iterdir()):
            os.link(path, place.victim / f"copy-{path.name}")
        return place.load

    def linked_folder(place: Place) -> Attempt:
        place.save().rename(place.victim / "elsewhere")
        (place.runs / "000009-step-9").symlink_to(place.victim / "elsewhere")
        return place.load

    def given_link(place: Place) -> Attempt:
        (place.folder / "best").symlink_to(place.save())
        return lambda: phalanx.load_checkpoint(place.folder / "best", model=place.model)

    yield Attacked("second names of all files", hard_linked, "works")
    yield Attacked("the folder is a link", linked_folder)
    yield Attacked("the user names a link", given_link, "works")

    def a_nul(place: Place) -> Attempt:
        return lambda: phalanx.load_checkpoint(f"{place.runs}\0x", model=place.model)

    yield Attacked("the user names a NUL", a_nul)


def attack_saving() -> Iterator[Attacked]:
    """Something else where a save locks, begins, writes and removes."""

    def at_lock(what: str) -> Attack:
        def attack(place: Place) -> Attempt:
            place.save()
            put(what, place.runs / ".phalanx-lock", place)
            return lambda: place.save(2)

        return attack

    for what in (*NO_FILES, "second name", "stranger's"):
        works = what in ("second name", "stranger's")
        yield Attacked(f"lock: {what}", at_lock(what), "works" if works else "refused")

    def left_over(what: str) -> Attack:
        """A save that was interrupted, as it seems: the next one removes it."""

        def attack(place: Place) -> Attempt:
            place.save()
            left = place.runs / "000009-step-9"
            left.mkdir()
            for name in ("begun", "manifest.json", "commit.json.unfinished", *NAMES[2:]):
                put(what, left / name, place)
            return lambda: place.save(2, keep=1)

        return attack

    for what in (*NO_FILES, "second name", "stranger's"):
        if what != "link to a link":  # of which there is one in a folder
            yield Attacked(f"left over: {what}", left_over(what), "works")

    def numbered_link(place: Place) -> Attempt:
        place.save()
        (place.runs / "000009-step-9").symlink_to(place.victim)
        (place.runs / "000000-step-9").symlink_to(place.victim)
        (place.victim / "commit.json").unlink()
        return lambda: [place.save(step, keep=1) for step in (2, 3)]

    def swapped(name: str) -> Attack:
        """The new folder becomes a link while it is written into."""

        def attack(place: Place) -> Attempt:
            place.save()
            real = os.fsync
            done = []

            def swap() -> None:
                for path in place.runs.glob("*-step-2"):
                    if not done and (path / name).exists():
                        done.append(path.rename(place.folder / "away"))
                        path.symlink_to(place.victim)

            def fsync(descriptor: int) -> None:
                real(descriptor)
                swap()

            def attempt() -> None:
                os.fsync = fsync  # type: ignore[assignment]
                try:
                    place.save(2, keep=1)
                finally:
                    os.fsync = real

            return attempt

        return attack

    yield Attacked("numbered links", numbered_link, "works")
    for name in ("begun", NAMES[2], "manifest.json", "commit.json.unfinished"):
        yield Attacked(f"a link after {name} is written", swapped(name), "either")


def attack_exporting() -> Iterator[Attacked]:
    """Something else beside the folder that an export makes."""

    def export(place: Place, kind: str) -> Attempt:
        out = place.folder / "out"
        return lambda: place.command("checkpoint", "export", place.runs, out, "--format", kind)

    def beside(what: str, kind: str) -> Attack:
        def attack(place: Place) -> Attempt:
            place.save()
            put(what, place.folder / ".out.unfinished", place)
            return export(place, kind)

        return attack

    def of_the_user(kind: str) -> Attack:
        """A folder of the user's that happens to have the name."""

        def attack(place: Place) -> Attempt:
            place.save()
            place.victim.rename(place.folder / ".out.unfinished")
            place.victim = place.folder / ".out.unfinished"
            return export(place, kind)

        return attack

    def of_a_stranger(kind: str) -> Attack:
        def attack(place: Place) -> Attempt:
            place.save()
            folder = place.folder / ".out.unfinished"
            folder.mkdir()
            os.chown(folder, STRANGER, STRANGER)
            return export(place, kind)

        return attack

    def links_inside(kind: str) -> Attack:
        """What a killed export has left, as it seems."""

        def attack(place: Place) -> Attempt:
            place.save()
            folder = place.folder / ".out.unfinished"
            folder.mkdir()
            for name in ("model.safetensors", ".metadata", ".metadata.tmp", "__0_0_0.distcp"):
                put("link", folder / name, place)
            return export(place, kind)

        return attack

    def out_is_a_link(kind: str) -> Attack:
        def attack(place: Place) -> Attempt:
            place.save()
            (place.folder / "out").symlink_to(place.victim)
            return export(place, kind)

        return attack

    for kind in ("hf", "dcp"):
        for what in NO_FILES:
            works = what == "folder"
            yield Attacked(f"{kind}: {what}", beside(what, kind), "works" if works else "refused")
        yield Attacked(f"{kind}: a folder of the user's", of_the_user(kind))
        yield Attacked(f"{kind}: a stranger's folder", of_a_stranger(kind))
        yield Attacked(f"{kind}: links left over", links_inside(kind), "works")
        yield Attacked(f"{kind}: out is a link", out_is_a_link(kind))

    def importing(what: str, name: str) -> Attack:
        def attack(place: Place) -> Attempt:
            place.save()
            export(place, "dcp")()
            put(what, place.folder / "out" / name, place)
            words = ("import", place.folder / "out", place.folder / "again", "--trust-pickle")
            return lambda: place.command("checkpoint", *words, "--step", "1")

        return attack

    for name in (".metadata", "__0_0_0.distcp"):
        for what in ("fifo", "folder", "socket", "device", "link to itself", "link to a device"):
            yield Attacked(f"import, {name}: {what}", importing(what, name))


def attack_weights() -> Iterator[Attacked]:
    """Something else in place of weights that `load_pretrained` reads."""

    def at(name: str, what: str) -> Attack:
        def attack(place: Place) -> Attempt:
            place.runs.mkdir()
            put(what, place.runs / name, place)
            return place.pretrained

        return attack

    for name in ("model.safetensors", "model.safetensors.index.json"):
        for what in NO_FILES:
            yield Attacked(f"{name}: {what}", at(name, what))
    yield Attacked("sparse", sparse_weights)

    def cached(place: Place) -> Attempt:  # as Hugging Face's cache has them
        weights(json.dumps(HEADER))(place)
        (place.runs / "model.safetensors").rename(place.folder / "blob")
        (place.runs / "model.safetensors").symlink_to("../blob")
        return place.pretrained

    yield Attacked("links to files", cached, "works")


def attack_other_files() -> Iterator[Attacked]:
    """Traces, scalars and tuning tables."""
    event = {"ph": "M", "name": "phalanx", "args": {"rank": 0, "world_size": 1, "host": "\x1b[2J"}}
    call = {"ph": "X", "name": "all_reduce", "cat": "collective", "ts": 1.0, "dur": 1.0, "args": {}}
    trace = "[\n" + "".join(json.dumps(each) + ",\n" for each in (event, call))

    def traced(what: str, name: str, *options: str, works: bool = False) -> Attacked:
        def attack(place: Place) -> Attempt:
            place.runs.mkdir()
            (place.runs / "rank-0-1-0.json").write_text(trace)
            if what:
                put(what, place.runs / name, place)

            def attempt() -> None:
                said = place.command("trace", place.runs, *options)
                assert said.replace("\n", "").isprintable(), repr(said)

            return attempt

        return Attacked(f"{name}: {what}", attack, "works" if works else "refused")

    for what in NO_FILES:
        yield traced(what, "rank-0-1-0.json")
        yield traced(what, "merged.json")
        yield traced(what, "merged.html", "--html")
        yield traced(what, "merged.json.part", works=True)
        yield traced(what, "merged.html.part", "--html", works=True)
    yield traced("", "escapes", works=True)

    def scalars(what: str, works: bool) -> Attacked:
        def attack(place: Place) -> Attempt:
            path = place.folder / "log.jsonl"
            (place.victim / "keys").write_text(
                '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n'
            )
            put(what, path, place)

            def run(backend: phalanx.Backend) -> None:
                with phalanx.Scalars(backend, [f"jsonl:{path}"]) as writing:
                    writing.log(2, loss=5.0)

            def attempt() -> None:
                phalanx.simulate(run, 1)
                assert path.lstat().st_uid == os.geteuid()
                assert path.read_text().count("\n") == (2 if what == "second name" else 1)

            return attempt

        return Attacked(f"scalars: {what}", attack, "works" if works else "either")

    yield scalars("second name", works=True)
    yield scalars("stranger's", works=True)

    def table(what: str) -> Attack:
        def attack(place: Place) -> Attempt:
            put(what, place.folder / "tuning", place)
            return lambda: tuned(place.folder / "tuning")

        return attack

    for what in NO_FILES:
        yield Attacked(f"tuning: {what}", table(what))


# ------------------------------------------------------------------------------
# Each field, with what it should not have

MUTATIONS = (
    *("null", "true", "false", "0", "1", "-1", "7", "255", "65536"),
    *("2147483648", "4294967296", "9223372036854775807", "9223372036854775808"),
    *("18446744073709551616", "-9223372036854775809", "1" + "0" * 30, BIG, "-" + BIG, "9" * 5000),
    *("0.5", "1.0", "1e0", "1e308", "1e999", "-0.0", "NaN", "Infinity", "0x10", "01"),
    *(
        '""',
        '"x"',
        '"../x"',
        '"/etc/passwd"',
        '"\\u0000"',
        '"\\ud800"',
        '"\\u001b[2J"',
        '"\\u202e"',
    ),
    *('"' + "x" * 100_000 + '"', '"\x1b[2J"', '"\xff"', '"$tensor"', '"float32"', '"F32"', "'x'"),
    *("[]", "[0]", "[-1]", "[1, 2]", "[[]]", "[null]", '["x"]', "[" * 64 + "]" * 64),
    *("[" * 900 + "]" * 900, "[" * DEEP, "[" * DEEP + "]" * DEEP, f"[{', '.join(['1'] * 65)}]"),
    *(f"[{', '.join(['4611686018427387904'] * 64)}]", f"[{', '.join(['0'] * DEEP)}]"),
    *("{}", '{"a": 1}', '{"$int": "0x1"}', '{"$tensor": "rng/0"}', '{"a":' * 900 + "1" + "}" * 900),
    "",
)
assert len(MUTATIONS) == 64
Field = tuple[str | int, ...]


def fields_of(value: Any, path: Field = ()) -> Iterator[Field]:
    """Each place in a value, inner ones too; of a long list the first."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from fields_of(inside, (*path, key))
    elif isinstance(value, list) and value:
        yield from fields_of(value[0], (*path, 0))


def with_text(value: Any, field: Field, text: str) -> str:
    """A value as JSON, with this text at a place."""
    changed = json.loads(json.dumps(value))
    inner = changed
    for step in field[:-1]:
        inner = inner[step]
    inner[field[-1]] = "HERE"
    return json.dumps(changed).replace('"HERE"', text, 1)


RICH = {"a": torch.ones(3), "b": {"c": [1, 2.0, "x", (1, 2**70)]}}


def saved(place: Place) -> Path:
    optimizer = torch.optim.AdamW(place.model.parameters())
    place.model(torch.ones(4)).sum().backward()
    optimizer.step()
    return place.save(optimizer=optimizer, extra=RICH)


def mutated(field: Field, text: str) -> Attack:
    def attack(place: Place) -> Attempt:
        checkpoint = saved(place)
        read = json.loads((checkpoint / "manifest.json").read_text())
        records(checkpoint, with_text(read, field, text))
        fresh = torch.optim.AdamW(place.model.parameters())
        return lambda: phalanx.load_checkpoint(place.runs, model=place.model, optimizer=fresh)

    return attack


def mutated_commit(field: Field, text: str) -> Attack:
    def attack(place: Place) -> Attempt:
        checkpoint = place.save()
        read = json.loads((checkpoint / "commit.json").read_text())
        (checkpoint / "commit.json").write_bytes(with_text(read, field, text).encode())
        return place.load

    return attack


def attack_fields() -> Iterator[Attacked]:
    """64 mutations of each field of a manifest, a commit record, a header and an index."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        checkpoint = saved(place)
        read = json.loads((checkpoint / "manifest.json").read_text())
        commit = json.loads((checkpoint / "commit.json").read_text())
    for number, text in enumerate(MUTATIONS):
        said = f"= {number}, {text[:20]!r}"
        for field in fields_of(read):
            yield Attacked(f"manifest {field} {said}", mutated(field, text), "either")
        for field in fields_of(commit):
            yield Attacked(f"commit {field} {said}", mutated_commit(field, text), "either")
        for field in fields_of(HEADER):
            header = weights(with_text(HEADER, field, text))
            yield Attacked(f"header {field} {said}", header, "either")
        whole = {"weight_map": {"weight": "x.safetensors"}}
        for field in fields_of(whole):
            an_index = index(with_text(whole, field, text))
            yield Attacked(f"index {field} {said}", an_index)


# ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few seconds")
    parser.add_argument("--only", default="", help="attacks with this in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {
        "contents": attack_contents(),
        "loading": attack_loading(),
        "saving": attack_saving(),
        "exporting": attack_exporting(),
        "weights": attack_weights(),
        "other files": attack_other_files(),
        "fields": attack_fields(),
    }
    lost = False
    for kind, attacks in kinds.items():
        chosen = [each for each in attacks if options.only in f"{kind}: {each.name}"]
        if options.short:
            chosen = chosen[:: 101 if kind == "fields" else 3]
        failed = 0
        for each in chosen:
            if problem := problem_of(each):
                failed += 1
                print(f"    {each.name}: {problem}", file=sys.stderr, flush=True)
        print(f"{kind}: {len(chosen) - failed} of {len(chosen)}", flush=True)
        lost |= failed > 0
    raise SystemExit(lost)


if __name__ == "__main__":
    main()
