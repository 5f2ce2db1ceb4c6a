"""One conformance suite for every store that members meet through, and what each alone promises."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta

import msgspec
import pytest
from elastic_stores import TOKEN, Etcd, MemoryStore, running_etcd

from phalanx.elastic.generations import Ended, Generations
from phalanx.elastic.membership import (
    Bounds,
    Decision,
    Enter,
    HeldPart,
    JoinGeneration,
    Newcomer,
    NextAction,
    Propose,
    Report,
    StandBy,
    View,
    WriteReport,
    next_action,
)
from phalanx.elastic.site import ProcessSite
from phalanx.elastic.stores import ForeignStore, JobStore, KeyValueStore, open_store
from phalanx.errors import AuthenticationError, BackendUnavailableError, DesyncError
from phalanx.launch.store import StoreServer, listen_for_store
from phalanx.transport.simulated import SimulatedBackend
from phalanx.wire.control import Endpoint

KINDS = ("memory", "launcher", "TCPStore", "HashStore", "etcd")
Opener = Callable[[], KeyValueStore]  # each call opens the same store once more


def launcher(stack: ExitStack) -> StoreServer:
    listener = listen_for_store("127.0.0.1", 0)
    return stack.enter_context(closing(StoreServer(listener, TOKEN.encode(), job="job")))


def open_kind(kind: str, stack: ExitStack, request: pytest.FixtureRequest) -> Opener:
    import torch.distributed as dist

    if kind == "memory":
        memory = MemoryStore()
        return lambda: memory
    if kind == "launcher":
        place = str(launcher(stack).endpoint)
        return lambda: open_store(place, TOKEN, job="job", launch="job").store
    if kind == "etcd":
        where = request.getfixturevalue("etcd").where
        return lambda: open_store(where, TOKEN, job="job").store
    if kind == "HashStore":
        table = dist.HashStore()
        return lambda: ForeignStore(table, 5.0)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: ForeignStore(
        dist.TCPStore(
            "127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=5)
        ),
        5.0,
    )


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, stack: ExitStack) -> Opener:
    open_again = open_kind(request.param, stack, request)
    return lambda: stack.enter_context(closing(open_again()))


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A name of this test's own: etcd lives as long as the module."""
    return request.node.name


# Every store -----------------------------------------------------------------------------------


def test_what_one_has_set_the_others_get(opener: Opener, key: str) -> None:
    one, other = opener(), opener()
    assert (one.get(key), other.get(key)) == ("", "")
    one.set(key, "one")
    assert other.get(key) == "one"
    other.set(key, "ö, second, and longer")
    assert (one.get(key), other.get(key)) == ("ö, second, and longer",) * 2
    assert one.get(f"{key}/other") == ""


def test_the_first_write_stays(opener: Opener, key: str) -> None:
    one, other = opener(), opener()
    assert one.compare_set(key, "", "first") == "first"
    assert other.compare_set(key, "", "second") == "first"
    assert other.compare_set(key, "wrong", "second") == "first"
    assert (one.get(key), other.get(key)) == ("first", "first")


def test_a_value_is_replaced_by_who_knows_it(opener: Opener, key: str) -> None:
    one, other = opener(), opener()
    one.set(key, "first")
    assert other.compare_set(key, "first", "second") == "second"
    assert one.compare_set(key, "first", "third") == "second"
    assert one.get(key) == "second"


def test_a_write_may_be_repeated(opener: Opener, key: str) -> None:
    """Its answer may have been lost."""
    store = opener()
    assert [store.compare_set(key, "", "mine") for _ in range(2)] == ["mine", "mine"]


def test_of_many_at_a_time_one_is_first(opener: Opener, key: str) -> None:
    stores = [opener() for _ in range(4)]
    barrier, found = threading.Barrier(4), [""] * 4

    def propose(number: int) -> None:
        barrier.wait()
        found[number] = stores[number].compare_set(key, "", f"of {number}")

    threads = [threading.Thread(target=propose, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {stores[0].get(key)}


def test_entries_come_as_they_were_written(opener: Opener, key: str) -> None:
    one, other = (JobStore(opener(), key, TOKEN.encode()) for _ in range(2))
    held = (HeldPart(7, 1, 0, 2), HeldPart(7, 1, 1, 2))
    report = Report(1, 0, "host:1", (1,), held, (Newcomer("new", "host:2"),))
    assert other.report(1, 0) is None
    one.write_report(report)
    assert other.report(1, 0) == report
    assert (other.report(1, 1), other.report(2, 0)) == (None, None)
    decision = Decision(2, ("a", "new"), "host:1", (0,), (1,), 7, 1)
    later = msgspec.structs.replace(decision, address="host:3")
    assert other.decision(2) is None
    assert other.propose(decision) == decision
    assert one.propose(later) == decision
    assert one.decision(2) == decision
    one.drop_report(1, 0)
    assert other.report(1, 0) is None


def test_newcomers_take_slots_and_leave_them(opener: Opener, key: str) -> None:
    one, other = (JobStore(opener(), key, TOKEN.encode()) for _ in range(2))
    a, b, c = (Newcomer(name, f"{name}:1") for name in "abc")
    assert one.newcomers() == {}
    assert (one.enter(a), other.enter(b)) == (0, 1)
    again = msgspec.structs.replace(b, beat=1)
    other.renew(1, again)
    assert one.newcomers() == {0: a, 1: again}
    one.vacate(1, b)  # which has lived on meanwhile
    assert one.newcomers() == {0: a, 1: again}
    one.vacate(0, a)
    assert other.newcomers() == {1: again}
    assert (one.enter(c), other.enter(again), one.enter(a)) == (0, 1, 2)


def drive(store: JobStore, view: View) -> NextAction:
    """What a process does from the loss until the rendezvous of the next generation."""

    def look() -> NextAction | None:
        """Do what is to be done; None: nothing, or what may change what is to be done."""
        ranks, generation = range(len(view.members)), view.generation
        reports = [store.report(generation, rank) for rank in ranks]
        known = msgspec.structs.replace(
            view,
            decision=store.decision(generation + 1),
            reports=tuple(each for each in reports if each is not None),
            newcomers=view.newcomers if view.members else tuple(store.newcomers().values()),
        )
        action = next_action(known)
        if isinstance(action, WriteReport):
            store.write_report(action.report)
        elif isinstance(action, Enter):
            store.enter(Newcomer(view.process, view.address))
        elif isinstance(action, Propose):
            store.propose(action.decision)
        return action if isinstance(action, (JoinGeneration, StandBy)) else None

    action = store.wait(look, 60.0)
    assert action is not None, "nothing was decided"
    return action


def test_processes_agree_on_the_first_generation_and_on_the_next(opener: Opener, key: str) -> None:
    stores = {name: JobStore(opener(), key, TOKEN.encode()) for name in "abcdn"}
    bounds = Bounds(2, 4)

    def drive_all(views: list[View]) -> list[NextAction]:
        with ThreadPoolExecutor(len(views)) as pool:
            return [*pool.map(drive, [stores[view.process] for view in views], views)]

    first = drive_all([View(name, f"{name}:1", bounds) for name in "abcd"])
    decision = first[0].decision
    assert first == [JoinGeneration(decision)] * 4
    assert sorted(decision.members) == [*"abcd"]

    members, held = decision.members, (HeldPart(7, 1, 0, 1),)
    views = [
        View(name, f"{name}:1", bounds, 1, members, lost=(1,), held=held)
        for rank, name in enumerate(members)
        if rank != 1
    ]
    newcomer = Newcomer("n", "n:1")
    stores["n"].enter(newcomer)
    views[0] = msgspec.structs.replace(views[0], newcomers=(newcomer,))
    others = members[:1] + members[2:]
    again = drive_all([*views, View("n", "n:1", bounds, 1, members, newcomers=(newcomer,))])
    expected = Decision(2, (*others, "n"), f"{members[0]}:1", (0, 2, 3), (1,), 7, 1)
    assert again == [JoinGeneration(expected)] * 4


def test_newcomers_that_come_at_a_time_have_a_slot_each(opener: Opener, key: str) -> None:
    opened = [JobStore(opener(), key, TOKEN.encode()) for _ in range(4)]
    newcomers = [Newcomer(name, f"{name}:1") for name in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        slots = [*pool.map(JobStore.enter, opened, newcomers)]
    assert sorted(slots) == [0, 1, 2, 3]
    assert opened[0].newcomers() == dict(zip(slots, newcomers, strict=True))


# Seals -----------------------------------------------------------------------------------------


def test_a_value_that_is_not_sealed_with_the_token_is_refused() -> None:
    store = MemoryStore()
    JobStore(store, "job", b"another token of letters").write_report(Report(1, 0, "host:1"))
    own = JobStore(store, "job", TOKEN.encode())
    with pytest.raises(AuthenticationError, match=r"job/elastic/report/1/0 in the store in memory"):
        own.report(1, 0)


def test_a_sealed_value_is_one_of_its_key_alone() -> None:
    store = MemoryStore()
    own = JobStore(store, "job", TOKEN.encode())
    own.write_report(Report(1, 0, "host:1"))
    store.set("job/elastic/report/1/1", store.get("job/elastic/report/1/0"))
    with pytest.raises(AuthenticationError, match=r"same PHALANX_TOKEN"):
        own.report(1, 1)


def test_a_value_of_another_release_is_refused_in_words() -> None:
    own = JobStore(MemoryStore(), "job", TOKEN.encode())
    own._write("report/1/0", Decision(2, (), ""))
    with pytest.raises(DesyncError, match=r"is the same Phalanx installed everywhere\?"):
        own.report(1, 0)


def test_without_a_token_there_is_no_store() -> None:
    with pytest.raises(AuthenticationError, match=r"Set PHALANX_TOKEN"):
        open_store(MemoryStore(), "", job="job")


# Waiting and failing ---------------------------------------------------------------------------


def test_a_wait_ends_when_there_is_something() -> None:
    store = JobStore(MemoryStore(), "job", TOKEN.encode())
    assert store.wait(lambda: store.decision(1), 0.05) is None
    decision = Decision(1, ("a",), "host:1")
    threading.Thread(target=store.propose, args=(decision,)).start()
    assert store.wait(lambda: store.decision(1), 20.0) == decision


def test_a_launcher_that_has_ended_is_named(stack: ExitStack) -> None:
    server = launcher(stack)
    store = open_store(str(server.endpoint), TOKEN, job="j", launch="job", timeout=0.2).store
    store.set("key", "value")
    server.close()
    with pytest.raises(
        BackendUnavailableError, match=r"launcher's store at 127.*'key', within 0.2 s"
    ):
        store.get("key")


def test_a_connection_that_broke_while_nothing_failed_is_made_anew(stack: ExitStack) -> None:
    server = launcher(stack)
    store = open_store(str(server.endpoint), TOKEN, job="j", launch="job").store
    stack.callback(store.close)
    store.set("key", "value")
    with server.lock:
        for client in list(server.clients):
            client.close()
    assert store.get("key") == "value"


def test_a_launcher_of_another_token_is_refused(stack: ExitStack) -> None:
    place = str(launcher(stack).endpoint)
    store = open_store(place, "another token of letters", job="j", launch="job").store
    with pytest.raises(AuthenticationError, match=r"are not of one job"):
        store.get("key")


class Blocking:
    """A store that never answers."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return not self.released.wait()

    get = set = compare_set = check


def test_a_store_that_blocks_is_given_up() -> None:
    blocking = Blocking()
    store = ForeignStore(blocking, 0.05)
    with pytest.raises(BackendUnavailableError, match=r"the given Blocking.*'key', within 0.05 s"):
        store.get("key")
    blocking.released.set()


def test_an_error_of_a_store_is_told() -> None:
    class Full(Blocking):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("no room")

    with pytest.raises(BackendUnavailableError, match=r"no room"):
        ForeignStore(Full(), 5.0).set("key", "value")


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dict has no set, check, compare_set"):
        open_store({}, TOKEN, job="job")
    with pytest.raises(ValueError, match=r"is not an address"):
        open_store("nowhere", TOKEN, job="job")


def test_etcd_without_its_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'phalanx\[etcd\]'"):
        open_store("etcd://a", TOKEN, job="job")


def test_etcd_that_is_not_there_is_named() -> None:
    pytest.importorskip("etcd3gw", reason="etcd3gw (the extra `etcd`) is not installed")
    store = open_store("etcd://127.0.0.1:9,127.0.0.1:10", TOKEN, job="job", timeout=0.1).store
    with pytest.raises(
        BackendUnavailableError, match=r"etcd at 127.0.0.1:9,127.0.0.1:10 .*'key'.*refused"
    ):
        store.get("key")


def test_a_member_of_etcd_that_is_silent_is_passed_over(
    etcd: Etcd, stack: ExitStack, key: str
) -> None:
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    where = f"etcd://127.0.0.1:{silent.getsockname()[1]},{etcd.where.removeprefix('etcd://')}"
    store = stack.enter_context(closing(open_store(where, TOKEN, job="job").store))
    assert store.compare_set(key, "", "value") == "value"
    assert store.get(key) == "value"


def test_the_leader_of_etcd_may_die(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_etcd(tmp_path_factory.mktemp("etcd"), members=3) as etcd:
        store = open_store(etcd.where, TOKEN, job="job", timeout=20.0).store
        assert store.compare_set("key", "", "value") == "value"
        leader = etcd.leader()
        leader.kill()
        leader.wait()
        assert store.compare_set("key", "value", "after it") == "after it"
        assert store.get("key") == "after it"
        store.close()


@contextmanager
def newcomer_to(store: KeyValueStore, *members: str) -> Iterator[Generations]:
    """A newcomer to a job whose generations have had one of these members each; "": itself."""
    opened = JobStore(store, "job", TOKEN.encode())
    site = ProcessSite("tcp", lambda: opened, Endpoint("127.0.0.1", 1), "", "")
    for number, process in enumerate(members, 1):
        opened.propose(Decision(number, (process or site.process,), "127.0.0.1:1"))
    [alone] = SimulatedBackend.create_group(1)
    yield Generations(site, alone, Bounds(1, 4), ["model"], lambda: False, wait=60.0, timeout=5.0)
    site.close()


def test_a_newcomer_reads_the_decisions_of_a_long_job_without_a_pause_after_each() -> None:
    looks: list[object] = []

    class Store(MemoryStore):
        def pauses(self, seconds: float, longest: float = 1.0) -> Iterator[object]:
            for pause in super().pauses(seconds, longest):
                looks.append(pause)
                yield pause

    others = (f"host/{number}/x" for number in range(1, 50))
    with newcomer_to(Store(), *others, "") as generations:
        assert generations.next([], set()).generation == 50
    assert len(looks) < 5


def test_a_training_has_ended_unless_its_last_ranks_have_formed_another_generation() -> None:
    store = MemoryStore()
    JobStore(store, "job", TOKEN.encode()).write_note("end", "2")
    with newcomer_to(store, "a/1/x", "a/2/x") as generations, pytest.raises(Ended):
        generations.next([], set())
    with newcomer_to(store, "a/1/x", "a/2/x", "") as generations:
        assert generations.next([], set()).generation == 3
