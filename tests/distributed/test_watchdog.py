import os
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from torch.distributed import barrier

from pkm.distributed import watchdog
from pkm.distributed.watchdog import RankWatchdog
from tests.support.fork import on_ranks

SECONDS = 60  # for what comes at once, on a busy machine


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0)


class Watch:
    """A watchdog whose losses are kept."""

    def __init__(self):
        self.losses, self.lost = [], threading.Event()
        self.peers = RankWatchdog(self.lose)
        self.unwatched = self.peers.watch()

    def lose(self, what):
        self.losses.append(what)
        self.lost.set()


def test_alone_there_is_nothing_to_watch():
    watch = Watch()
    watch.peers.leave(goodbye=True)
    assert watch.unwatched == watch.losses == []


@pytest.mark.parametrize("dead", [0, 2])
def test_all_hear_who_died_and_a_goodbye_is_no_death(dead):
    def outcome(rank):
        watch = Watch()
        if rank == 1:
            watch.peers.leave(goodbye=True)
        barrier()
        if rank == dead:
            watch.peers.leave(goodbye=False)
        elif rank != 1:
            assert watch.lost.wait(SECONDS)
            watch.peers.leave(goodbye=True)
        return watch.losses

    said = [f"rank {dead} has ended"]
    assert on_ranks(4, outcome) == [[] if rank in (1, dead) else said for rank in range(4)]


def test_ranks_that_end_without_a_goodbye_of_their_own_do_not_act_on_a_death():
    def outcome(rank):
        watch = Watch()
        watch.peers.ending()
        barrier()
        if rank == 2:
            watch.peers.leave(goodbye=False)
        if rank == 1:
            watch.peers._thread.join(SECONDS)  # it has heard
            assert not watch.peers._thread.is_alive()
        barrier()
        watch.peers.leave(goodbye=False)
        return watch.losses

    assert on_ranks(3, outcome) == [[], [], []]


@pytest.mark.parametrize("goodbye", [True, False])
def test_no_thread_and_no_socket_is_left_behind(goodbye):
    def outcome(rank):
        before = os.listdir("/proc/self/fd")
        for _ in range(5):
            watch = Watch()
            barrier()
            watch.peers.ending()
            barrier()
            watch.peers.leave(goodbye)
            assert watch.losses == []
        names = [thread.name for thread in threading.enumerate()]
        return "peers" in names, len(os.listdir("/proc/self/fd")) - len(before)

    assert on_ranks(3, outcome) == [(False, 0)] * 3


def test_who_cannot_reach_rank_0_is_known_to_all(monkeypatch):
    connected = watchdog._connected
    monkeypatch.setattr(watchdog, "_connected", lambda *offer: None if watchdog.dist.rank() == 1 else connected(*offer))

    def outcome(rank):
        watch = Watch()
        watch.peers.leave(goodbye=True)
        return watch.unwatched

    assert on_ranks(3, outcome) == [[1], [1], [1]]


@contextmanager
def answering(answer):
    """The port of a server that gives everyone this answer."""

    def serve():
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            with line:
                watchdog._read(line, 20)
                line.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_rank_0_is_known_by_its_token_at_the_first_address_that_has_it():
    token = b"t" * 16
    with answering(token) as port:
        with watchdog._connected(token, port, "elsewhere", ["127.0.0.2", "127.0.0.1"]) as line:
            assert line.getpeername() == ("127.0.0.1", port) and line.gettimeout() is None
        assert watchdog._connected(b"u" * 16, port, socket.gethostname(), ["127.0.0.1"]) is None


@pytest.mark.parametrize("hello", [b"", b"x", b"x" * 20, b"t" * 16 + b"\0"])
def test_a_stranger_who_connects_is_sent_away(hello):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as stranger:
        stranger.connect(listener.getsockname())
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
        assert watchdog._came(listener, b"t" * 16) is None
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
