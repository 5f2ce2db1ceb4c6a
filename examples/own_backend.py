"""A backend of your own: messages go through queues, and ranks are threads."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import phalanx
from phalanx.core.engine import Engine
from phalanx.core.posted import PostedSend, Wait
from phalanx.core.transport import Control, Transport


class QueueTransport(Transport):
    def __init__(self, engine: Engine, queues: list[SimpleQueue[Any]]) -> None:
        self.engine, self.queues, self.rank = engine, queues, engine.rank

    def send(self, send: PostedSend) -> None:
        channel, fingerprint = send.work.channel, send.work.call.fingerprint
        message = channel, self.rank, memoryview(bytearray(send.view)), fingerprint
        self.queues[send.peer].put(lambda engine: engine.matching.deliver(*message))
        send.complete()

    def control(self, peer: int, group: int, message: Control) -> None:
        self.queues[peer].put(lambda engine: engine.on_control(self.rank, group, message))

    def wait(self, until: Wait) -> None:
        while not until.over:
            self.poll(until, longest=0.1)

    def poll(self, work: Wait, longest: float = 0.0) -> None:
        with suppress(Empty):
            arrive = self.queues[self.rank].get(timeout=longest)
            with self.engine.lock:
                arrive(self.engine)
        with self.engine.lock:
            work.attend()  # its deadline may be over
            self.engine.run_ready()


def backend_of(rank: int, queues: list[SimpleQueue[Any]]) -> phalanx.Backend:
    engine = Engine(rank, len(queues))
    engine.transport = QueueTransport(engine, queues)
    return phalanx.Backend(engine)


if __name__ == "__main__":
    queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(3)]
    with ThreadPoolExecutor(3) as ranks:
        print(*ranks.map(lambda r: phalanx.all_gather_object(r, backend_of(r, queues)), range(3)))
