"""Several nodes of a job, in one process."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import pytest
from ports import unused_port
from waiting import wait_until

from phalanx.errors import AuthenticationError, BackendUnavailableError, MisuseError
from phalanx.launch.nodes import NodeExit, Nodes
from phalanx.launch.store import connect_store

PATIENCE = 30.0
TOKEN = "a token of many letters"


@pytest.fixture
def master() -> str:
    return f"127.0.0.1:{unused_port()}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def no_such_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name of a host is known, and a node tries once."""

    def unknown(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("phalanx.launch.nodes.PATIENCE", 0)


def join(stack: ExitStack, master: str, *ranks: int, **options: int) -> list[Nodes]:
    """One node for each number of ranks."""
    common = {"nodes": len(ranks), "max_restarts": 0, **options}
    started = [
        Nodes(node_rank=node, ranks=number, master=master, **common)
        for node, number in enumerate(ranks)
    ]
    for node in started:
        stack.callback(node.close, PATIENCE)
    # The others leave before node 0, whose store they need, waits for them.
    stack.callback(lambda: [node._closing.set() for node in started])
    return started


def until(*nodes: Nodes, generation: int | None = None) -> None:
    """Wait until the nodes have joined, or agree on how the generation has ended."""

    def over(node: Nodes) -> bool:
        node.check()
        return (node.placement if generation is None else node.outcome(generation)) is not None

    for node in nodes:
        wait_until(partial(over, node))


def test_every_node_knows_its_ranks_and_those_of_all(stack: ExitStack, master: str) -> None:
    nodes = join(stack, master, 2, 1, 4)
    until(*nodes)
    assert [node.placement for node in nodes] == [(0, 7), (2, 7), (3, 7)]


def test_every_node_reads_the_same_of_every_generation(stack: ExitStack, master: str) -> None:
    nodes = join(stack, master, 1, 1)
    until(*nodes)
    failure = NodeExit(1, True, "rank 1 failed: exit code 7", code=7)
    nodes[1].write(failure)
    wait_until(lambda: nodes[0].failed(0))
    assert nodes[0].outcome(0) is None
    nodes[0].write(NodeExit(0, failed=False))
    until(*nodes, generation=0)
    ended = NodeExit(0, failed=False, port=nodes[1].master_port(1))
    assert nodes[0].outcome(0) == nodes[1].outcome(0) == [failure, ended]
    for number, node in enumerate(nodes):
        node.write(NodeExit(number, failed=False))
    until(*nodes, generation=1)
    assert not nodes[0].failed(1)


def test_a_node_that_ends_the_job_is_not_waited_for(stack: ExitStack, master: str) -> None:
    nodes = join(stack, master, 1, 1)
    until(*nodes)
    final = NodeExit(1, True, "its launcher was stopped by SIGINT", code=1, final=True)
    nodes[1].write(final)
    until(nodes[0], generation=0)
    assert nodes[0].outcome(0) == [final]


def test_two_launchers_of_one_node_are_told(stack: ExitStack, master: str) -> None:
    first = Nodes(nodes=2, ranks=1, master=master)
    stack.callback(first.close, PATIENCE)
    twins = [Nodes(nodes=2, node_rank=1, ranks=1, master=master) for _ in "ab"]
    for twin in twins:
        stack.callback(twin.close, PATIENCE)
    until(first)
    with pytest.raises(MisuseError, match="another launcher of this job has --node-rank 1"):
        until(*twins)


def test_nodes_that_were_started_in_different_ways_are_told(stack: ExitStack, master: str) -> None:
    nodes = [
        Nodes(nodes=2, node_rank=node, ranks=1, max_restarts=node, master=master) for node in (0, 1)
    ]
    for node in nodes:
        stack.callback(node.close, PATIENCE)
    with pytest.raises(
        MisuseError, match=r"node 1 was started with --nnodes, --max-restarts \[2, 1\]"
    ):
        until(nodes[0])


def test_a_node_without_the_store_is_told(stack: ExitStack, master: str) -> None:
    nodes = join(stack, master, 1, 1)
    until(*nodes)
    nodes[0]._closing.set()
    nodes[0]._thread.join(PATIENCE)
    with pytest.raises(BackendUnavailableError, match=r"store at .* does not answer any more"):
        until(nodes[1], generation=0)


def test_a_node_says_for_which_others_it_waits(stack: ExitStack, master: str) -> None:
    first, second = (Nodes(nodes=3, node_rank=node, ranks=1, master=master) for node in (0, 1))
    for node in (first, second):
        stack.callback(node.close, PATIENCE)
        stack.callback(node._closing.set)

    def tells(node: Nodes, told: str) -> bool:
        node.check()
        return node.awaited() == told

    for number, node in enumerate((first, second)):
        told = f"node {number} of 3 waits for node 2 to meet at {master}, for 300 s at most"
        wait_until(partial(tells, node, told), node.awaited)


@pytest.mark.usefixtures("no_such_name")
def test_a_node_that_cannot_resolve_the_master_says_so_while_it_tries(stack: ExitStack) -> None:
    node = Nodes(nodes=2, node_rank=1, ranks=1, master="node1:29500")
    stack.callback(node.close, PATIENCE)
    assert node.awaited() == (
        "node 1 of 2 waits for node 0 to meet at node1:29500, for 0 s at most; the host name "
        "cannot be resolved here: Name or service not known"
    )
    with pytest.raises(BackendUnavailableError, match=r"same --master.* Name or service not known"):
        until(node)


def test_a_name_that_comes_late_is_waited_for_also_by_the_node_that_has_it(
    stack: ExitStack, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = socket.getaddrinfo, Counter[str]()

    def late(host: str, *args: Any, **options: Any) -> Any:
        """As in a pod: nobody knows the name, until it is known."""
        if host != "localhost":
            return real(host, *args, **options)
        asked[threading.current_thread().name] += 1
        if sum(asked.values()) < 8:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    nodes = join(stack, master.replace("127.0.0.1", "localhost"), 1, 1)
    until(*nodes)
    assert sum(asked.values()) >= 8


@pytest.mark.usefixtures("no_such_name")
def test_a_name_that_never_comes_is_named_by_the_node_that_has_it(stack: ExitStack) -> None:
    node = Nodes(nodes=2, ranks=1, master="train-0.train:29500")
    stack.callback(node.close, PATIENCE)
    words = r"node 0 cannot listen at train-0\.train:29500: .*Name or service not known: give --mas"
    with pytest.raises(BackendUnavailableError, match=words):
        until(node)


def test_a_node_that_was_killed_comes_back_when_the_job_that_it_was_in_has_ended(
    stack: ExitStack, master: str
) -> None:
    """As a pod does that is started again: node 0 waits some seconds for the last word of it."""
    old = join(stack, master, 1, 1)
    until(*old)
    old[0].write(NodeExit(0, True, "rank 0 failed: it lost rank 1", code=1))
    wait_until(lambda: old[0].failed(0))
    again = Nodes(nodes=2, node_rank=1, ranks=1, master=master)
    stack.callback(again.close, PATIENCE)

    def waits_for_the_end() -> bool:
        again.check()
        return "to end" in again.awaited()

    wait_until(waits_for_the_end)
    for node in reversed(old):
        node.close(PATIENCE)
    again.check()
    first = Nodes(nodes=2, ranks=1, master=master)
    stack.callback(first.close, PATIENCE)
    stack.callback(lambda: [node._closing.set() for node in (first, again)])
    until(first, again)
    assert (first.placement, again.placement) == ((0, 2), (1, 2))


def test_one_node_has_a_store_and_agrees_with_itself(stack: ExitStack) -> None:
    node = Nodes(ranks=3, token=TOKEN, job="a job")
    stack.callback(node.close, PATIENCE)
    assert node.placement == (0, 3)
    deadline = time.monotonic() + PATIENCE
    store = connect_store(node.endpoint, TOKEN, deadline, job="a job")
    stack.callback(store.close)
    assert (store.add("key", 2), store.add("key", 3)) == (2, 5)
    node.check()
    node.write(NodeExit(0, failed=True))
    ended = node.outcome(0)
    assert ended is not None
    assert [(one.node, one.failed) for one in ended] == [(0, True)]


def test_every_generation_has_a_port_of_its_own_for_torchs_store(
    stack: ExitStack, master: str
) -> None:
    nodes = join(stack, master, 1, 1)
    until(*nodes)
    for generation in range(2):
        ports = [node.master_port(generation) for node in nodes]
        assert ports[0] == ports[1]
        with socket.create_server(("127.0.0.1", ports[0])):  # it is free
            for number, node in enumerate(nodes):
                node.write(NodeExit(number, failed=False))
            until(*nodes, generation=generation)
        assert nodes[0].master_port(generation + 1) != ports[0]


def test_a_node_that_is_closed_while_it_begins_keeps_no_port(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = socket.getaddrinfo, threading.Event()

    def late(*args: Any, **options: Any) -> Any:
        assert made.wait(PATIENCE)
        assert node._closing.wait(PATIENCE)
        return real(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    node = Nodes(nodes=2, ranks=1, master=master)
    made.set()
    assert node.close(PATIENCE)
    assert node._reserved is not None
    assert node._reserved.fileno() == -1


def test_words_of_other_nodes_do_nothing_to_a_terminal(stack: ExitStack, master: str) -> None:
    nodes = join(stack, master, 1, 1)
    until(*nodes)
    nodes[1].write(NodeExit(1, True, "\x1b[31mred\x1b[2J\nand a line", final=True))
    until(nodes[0], generation=0)
    ended = nodes[0].outcome(0)
    assert ended is not None
    assert ended[0].summary == "red and a line"


def test_a_node_without_the_token_is_told(stack: ExitStack, master: str) -> None:
    zero = Nodes(nodes=2, ranks=1, master=master, token=TOKEN)
    one = Nodes(nodes=2, node_rank=1, ranks=1, master=master, token=TOKEN[::-1])
    for node in (one, zero):
        stack.callback(node.close, PATIENCE)
        stack.callback(node._closing.set)
    with pytest.raises(AuthenticationError, match=r"do not hold the same token \(PHALANX_TOKEN"):
        until(one)
