"""Types that msgspec reads: one thread at a time learns them, in each read of the package."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import msgspec

import phalanx
from phalanx.wire.control import learned

said: list[str] = []


def learn_as_another() -> None:
    learned(Outer)
    said.append("the other has it")


other = threading.Thread(target=learn_as_another)


def what_takes_long() -> type[int]:
    """Evaluated when the type is learned, when msgspec knows of `Outer`, and not what is inside."""
    other.start()
    other.join(0.1)  # it waits
    said.append("it is learned")
    return int


class Inner(msgspec.Struct):
    number: what_takes_long()  # type: ignore[valid-type]


class Outer(msgspec.Struct):
    inner: Inner


def test_a_thread_that_reads_a_type_waits_for_the_one_that_learns_it() -> None:
    """msgspec 0.22 would crash the process."""
    read = msgspec.json.decode(b'{"inner": {"number": 3}}', type=learned(Outer))
    other.join()
    assert read.inner.number == 3
    assert said == ["it is learned", "the other has it"]


def test_every_read_is_of_a_type_that_is_learned() -> None:
    unlearned = []
    for path in Path(phalanx.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("msgspec."):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            kinds = [each.value for each in node.keywords if each.arg == "type"]
            kinds += node.args[1:] if name == "convert" else []
            unlearned += [
                f"{path.name}:{node.lineno}"
                for kind in kinds
                if not ast.unparse(kind).startswith("learned(") and kind_has_fields(kind)
            ]
    assert unlearned == []


def kind_has_fields(kind: ast.expr) -> bool:
    """Such as `Manifest`, and unlike `list[str]`."""
    return ast.unparse(kind) != "list[str]"
