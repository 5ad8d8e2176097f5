"""When one rank dies, the others end too, even if they are blocked in a collective.

gloo's collectives fail when a rank is gone. NCCL's go on waiting, in C code that neither exceptions nor signals interrupt.
So every rank keeps a connection to rank 0, on which nothing is sent before it says goodbye. If it breaks without a goodbye,
the rank has died, and rank 0 tells the others. These are plain sockets because a thread that waits on a socket can be woken;
one that waits in gloo cannot, and aborts the interpreter if that exits meanwhile.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress

from pkm.distributed import dist

# How long the main thread has to notice a death by itself: its message says more than the watchdog's.
GRACE_SECONDS = 5.0
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0  # on a busy machine
# A machine that vanished without closing its connections is noticed after five minutes.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 8}
TOKEN_BYTES = 16
WORD = struct.Struct("!i")  # the number of a rank that has died, or:
GOODBYE = -1


class RankWatchdog:
    """Watches the other ranks of a run, from `watch` to `leave`. In a single process it does nothing.

    lost    called in the watchdog's thread, with what happened, when a rank has died and the main thread has not called
            `ending` within GRACE_SECONDS: it is blocked, so the callback has to end the process
    """

    def __init__(self, lost: Callable[[str], object]):
        self._lost = lost
        self._ending = threading.Event()
        self._deciding = threading.Lock()
        self._line: socket.socket | None = None  # to rank 0; on rank 0 to its thread
        self._thread: threading.Thread | None = None

    def watch(self) -> list[int]:
        """Begin; every rank must call it. Returns the ranks that cannot reach rank 0, so that nobody watches them."""
        if dist.world_size() == 1:
            return []
        token = uuid.uuid4().bytes
        listener = _listening() if dist.is_main() else None
        port = listener.getsockname()[1] if listener else 0
        offered = dist.broadcast_object((token, port, socket.gethostname(), list(_own_addresses())))
        if listener:
            self._line, woken = socket.socketpair()
            self._start(lambda: self._hear_all(listener, woken, token))
        else:
            self._line = _connected(*offered)
            if self._line:
                self._start(self._hear_rank_0)
        return [rank for rank, watched in enumerate(dist.gather_objects(self._line is not None)) if not watched]

    def ending(self) -> None:
        """The main thread has begun to shut down: from now on the watchdog does nothing when a rank dies."""
        with self._deciding:
            self._ending.set()

    def leave(self, goodbye: bool) -> None:
        """Stop watching and being watched. Without a goodbye the other ranks treat it as a death."""
        self.ending()
        if self._line and self._thread:
            if goodbye:
                _say(self._line, GOODBYE)
            with suppress(OSError):  # broken already
                self._line.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._line.close()
            self._line = None

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="peers", daemon=True)
        self._thread.start()

    def _hear_rank_0(self) -> None:
        assert self._line
        word = _heard(self._line)
        if word != GOODBYE:
            self._act_on_death_of(word or 0)

    def _hear_all(self, listener: socket.socket, woken: socket.socket, token: bytes) -> None:
        ranks: dict[socket.socket, int] = {}
        missing = dist.world_size() - 1
        with listener, woken, selectors.DefaultSelector() as ready:
            ready.register(listener, selectors.EVENT_READ)
            ready.register(woken, selectors.EVENT_READ)
            while woken not in (speaking := [key.fileobj for key, _ in ready.select()]):
                for line in speaking:
                    assert isinstance(line, socket.socket)
                    if line is not listener:
                        ready.unregister(line)
                        self._pass_on(line, ranks)
                    elif (came := _came(listener, token)) is not None:
                        ranks[came[0]] = came[1]
                        ready.register(came[0], selectors.EVENT_READ)
                        missing -= 1
                        if not missing:
                            ready.unregister(listener)
                            listener.close()
            goodbye = _heard(woken) == GOODBYE
        for line in ranks:
            with line:
                if goodbye:
                    _say(line, GOODBYE)

    def _pass_on(self, line: socket.socket, ranks: dict[socket.socket, int]) -> None:
        """Take the last word of a rank, or its death, and tell the other ranks of a death."""
        rank = ranks.pop(line)
        with line:
            word = _heard(line)
        if word != GOODBYE:
            for other in ranks:
                _say(other, rank)
            self._act_on_death_of(rank)

    def _act_on_death_of(self, rank: int) -> None:
        if not self._ending.wait(GRACE_SECONDS):
            with self._deciding:
                if not self._ending.is_set():
                    self._lost(f"rank {rank} has ended")


def _say(line: socket.socket, word: int) -> None:
    with suppress(OSError):  # who is gone need not hear it
        line.sendall(WORD.pack(word))


def _heard(line: socket.socket) -> int | None:
    """The next word on the connection; None if it is closed or broken."""
    try:
        return int(WORD.unpack(_read(line, WORD.size))[0])
    except (OSError, struct.error):
        return None


def _read(line: socket.socket, size: int) -> bytes:
    """`size` bytes, or fewer if the connection ends before."""
    said = b""
    while len(said) < size and (more := line.recv(size - len(said))):
        said += more
    return said


def _listening() -> socket.socket:
    backlog = dist.world_size()
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _own_addresses() -> Iterator[str]:
    """Addresses at which the other ranks may reach this one, the likeliest first."""
    master = os.environ.get("MASTER_ADDR")
    if master:
        # Where there are several networks: the one on which the ranks reach the master.
        with suppress(OSError):
            for family, kind, protocol, _, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind, protocol) as route:
                    route.connect(address)  # sends nothing
                    yield route.getsockname()[0]
        yield master
    yield socket.gethostname()


def _connected(token: bytes, port: int, host: str, addresses: list[str]) -> socket.socket | None:
    """A connection to rank 0, which proves by the token that it is rank 0; None if no address leads to it."""
    nearest = ["localhost"] if host == socket.gethostname() else []
    for address in dict.fromkeys(nearest + addresses):
        with suppress(OSError):
            line = socket.create_connection((address, port), CONNECT_SECONDS)
            try:
                line.settimeout(ANSWER_SECONDS)
                line.sendall(token + WORD.pack(dist.rank()))
                if _read(line, TOKEN_BYTES) == token:
                    return _lasting(line)
            except OSError:
                pass
            line.close()
    return None


def _came(listener: socket.socket, token: bytes) -> tuple[socket.socket, int] | None:
    """(connection, number) of a rank that connects; None if whoever connected does not know the token."""
    with suppress(OSError):
        line, _ = listener.accept()
        try:
            line.settimeout(CONNECT_SECONDS)
            if _read(line, TOKEN_BYTES) == token and (rank := _heard(line)) is not None:
                line.sendall(token)
                return _lasting(line), rank
        except OSError:
            pass
        line.close()
    return None


def _lasting(line: socket.socket) -> socket.socket:
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return line
