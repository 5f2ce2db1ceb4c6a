"""What the environment of a pod says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from phalanx.errors import MisuseError
from phalanx.launch.command import run_command
from phalanx.launch.pod import read_pod
from phalanx.launch.run import Job

app = typer.Typer()
app.command(context_settings={"allow_interspersed_args": False})(run_command)

TRAINJOB = {  # as Kubeflow's Trainer sets it
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "2",
}
INDEXED = {"JOB_COMPLETION_INDEX": "1"}  # as the controller of Jobs sets it


def test_a_pod_of_a_trainjob_is_told_everything() -> None:
    assert read_pod(TRAINJOB) == (4, 3, 2, "train-node-0-0.train:29500")


def test_a_pod_of_an_indexed_job_is_told_which_node_it_is() -> None:
    place = read_pod(INDEXED, ranks=2, nodes=2, master="train-0.train:29500")
    assert place == (2, 2, 1, "train-0.train:29500")


def test_options_go_before_the_environment() -> None:
    assert read_pod(TRAINJOB, ranks=1, nodes=2, node_rank=0, master="a:1") == (1, 2, 0, "a:1")


def test_without_a_controller_there_is_one_rank_on_one_node() -> None:
    assert read_pod({}) == read_pod(dict.fromkeys(TRAINJOB, "")) == (1, 1, 0, "")


def test_one_node_is_node_0_whatever_the_index_of_its_pod() -> None:
    """An indexed Job may hold many jobs of one node each."""
    assert read_pod(INDEXED, ranks=2) == (2, 1, 0, "")
    assert read_pod(TRAINJOB, nodes=1) == (4, 1, 0, "")


def test_the_node_rank_goes_before_the_index() -> None:
    assert read_pod({**TRAINJOB, "JOB_COMPLETION_INDEX": "0"}).node_rank == 2


def test_an_ipv6_address_of_node_0_is_put_in_brackets() -> None:
    assert read_pod({**TRAINJOB, "PET_MASTER_ADDR": "fd00::1"}).master == "[fd00::1]:29500"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PET_NPROC_PER_NODE", "auto", r"PET_NPROC_PER_NODE=auto .*number from 1.* give -n, "),
        ("PET_NPROC_PER_NODE", "0", r"PET_NPROC_PER_NODE=0 "),
        ("PET_NNODES", "1:4", r"PET_NNODES=1:4 .* give --nnodes, "),
        ("PET_NODE_RANK", "-1", r"PET_NODE_RANK=-1 .*number from 0.* give --node-rank, "),
        ("PET_MASTER_PORT", "", r"PET_MASTER_PORT= .* give --master, "),
        ("PET_MASTER_PORT", "http", r"PET_MASTER_PORT=http .*is not an address"),
        ("PET_MASTER_ADDR", "", r"PET_MASTER_ADDR= "),
    ],
)
def test_a_value_that_makes_no_sense_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        read_pod({**TRAINJOB, name: value})


def test_a_bad_value_is_no_matter_where_the_option_is_given() -> None:
    assert read_pod({**TRAINJOB, "PET_NPROC_PER_NODE": "auto"}, ranks=2).ranks == 2


def test_the_launcher_takes_what_the_controller_says(asked: list[Job]) -> None:
    CliRunner().invoke(app, ["train.py"], env=TRAINJOB)
    CliRunner().invoke(app, ["-n", "1", "--node-rank", "0", "train.py"], env=TRAINJOB)
    job = Job(4, "train.py", nodes=3, node_rank=2, master="train-node-0-0.train:29500")
    assert asked == [job, replace(job, ranks=1, node_rank=0)]


def test_the_help_of_the_launcher_names_the_variables() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    for name in TRAINJOB:
        assert name in shown
