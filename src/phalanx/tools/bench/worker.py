"""The program of one rank: `python -m phalanx.tools.bench.worker FOLDER`.

FOLDER/ask.json says what to measure; rank 0 writes what it finds to FOLDER/found.jsonl.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from phalanx.launch.scratch import die_with_parent
from phalanx.tools.bench.records import Ask, Message

ASK, FOUND = "ask.json", "found.jsonl"


def main(folder: Path) -> None:
    """Be a rank."""
    die_with_parent(os.getppid())
    ask = msgspec.json.decode((folder / ASK).read_bytes(), type=Ask)

    def tell(message: Message) -> None:
        with (folder / FOUND).open("ab") as file:
            file.write(msgspec.json.encode(message) + b"\n")

    from phalanx.tools.bench.rank import run_rank  # noqa: PLC0415 -- it takes a moment

    run_rank(ask, tell)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
