"""The job script of docs/elastic.md, under a real Slurm: two nodes train together by etcd."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster, why_not

pytestmark = pytest.mark.skipif(
    bool(why_not()) or not shutil.which("etcd"), reason=why_not() or "etcd is not installed"
)
ROOT = Path(__file__).parents[2]
(SCRIPT,) = re.findall(
    r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs/elastic.md").read_text(), re.S
)
STORE = "etcd://10.77.0.1:2379"


def test_the_jobs_of_an_array_train_together(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path) as slurm:
        address = STORE.removeprefix("etcd://")
        urls = [f"--{who}-client-urls=http://{address}" for who in ("listen", "advertise")]
        etcd = slurm.start("sh", "-c", "exec etcd $0 $1 2> etcd.log", *urls)
        try:
            (slurm.home / "job.token").write_text("a token of many letters")
            (slurm.home / "job.token").chmod(0o600)
            shutil.copy(ROOT / "examples" / "elastic.py", slurm.home / "train.py")
            script = SCRIPT.replace("etcd://a:2379,b:2379,c:2379", STORE).replace("0-3", "0-1")
            script = script.replace("-n 4 --min 2 --max 16", "-n 1 --min 2 --max 2")
            script = script.replace("srun phalanx", f"srun {sys.executable} -m phalanx")
            (slurm.home / "job.sh").write_text(script)
            said = slurm.start("sbatch", "job.sh", HOME=str(slurm.home)).communicate()[0]
            number = said.split()[-1]
            for task in "01":
                slurm.wait_for(f"{number}_{task}", "COMPLETED")
            logs = "".join(path.read_text() for path in slurm.home.glob("slurm-*.out"))
            assert "step 450: loss 0." in logs, logs
            assert ", 2 ranks" in logs
            assert logs.count("% right") == 2
        finally:
            etcd.terminate()
            etcd.communicate()
