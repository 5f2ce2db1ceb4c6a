from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import DistributedError, InvalidRankError, InvalidWorldSizeError, MisuseError
from phalanx.launch.run import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    script = tmp_path / "train.py"
    script.write_text("")
    return Job(ranks=2, target=str(script))


def test_a_script_a_folder_and_a_module_can_be_run(job: Job, tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("")
    for target, module in ((job.target, False), (str(tmp_path), False), ("json.tool", True)):
        replace(job, target=target, module=module).check()
    replace(job, nodes=2, node_rank=1, master="node1:29500").check()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"ranks": 0}, InvalidWorldSizeError, "at least one"),
        ({"nodes": 0}, InvalidWorldSizeError, "at least one"),
        ({"nodes": 2, "node_rank": 2, "master": "a:1"}, InvalidRankError, "--node-rank 2"),
        ({"nodes": 2}, MisuseError, "--master"),
        ({"nodes": 2, "master": "node1"}, MisuseError, "host:port"),
        ({"max_restarts": -1}, MisuseError, "--max-restarts"),
        ({"target": "missing.py"}, MisuseError, "missing.py is not there"),
        ({"target": "missing"}, MisuseError, "add -m"),
        ({"target": "no_such_module.sub", "module": True}, MisuseError, "no_such_module"),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(
    job: Job, changes: dict[str, object], error: type[DistributedError], words: str
) -> None:
    with pytest.raises(error, match=words):
        replace(job, **changes).check()  # type: ignore[arg-type]
