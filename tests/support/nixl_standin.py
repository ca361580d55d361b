"""What `moe_mk.comm.network.nixl` uses of the nixl library, between agents of one process, as strict as the library. As
over UCX and TCP, bytes move and notifications arrive only while the receiver asks for notifications."""

from __future__ import annotations

import ctypes
import enum
from collections import defaultdict
from dataclasses import dataclass, field
from threading import RLock
from types import SimpleNamespace

AGENTS: dict[str, nixl_agent] = {}
MAGIC = b"stand-in of nixl, agent "
LOCK = RLock()
Regions = list[tuple[int, int, int]]


class nixlInvalidParamError(Exception):
    """As the library names it."""


class nixl_thread_sync_t(enum.Enum):
    NIXL_THREAD_SYNC_STRICT = 1


def nixl_agent_config(
    *, enable_prog_thread: bool, backends: list[str], sync_mode: nixl_thread_sync_t, capture_telemetry: bool = False
) -> SimpleNamespace:
    assert not enable_prog_thread and not backends and isinstance(sync_mode, nixl_thread_sync_t)
    return SimpleNamespace(capture_telemetry=capture_telemetry)


@dataclass(eq=False)
class Transfer:
    source: int
    target: int
    size: int
    peer: str
    note: bytes
    state: str = "INIT"

    def release(self) -> None:
        assert self.state == "DONE"
        self.state = "RELEASED"


@dataclass(eq=False)
class nixl_agent:
    name: str
    settings: SimpleNamespace
    memory: Regions = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    inbox: list[tuple[str, Transfer | bytes]] = field(default_factory=list)

    def create_backend(self, plugin: str, options: dict[str, dict[str, str]]) -> None:
        assert plugin == "UCX" and options["engine_config"].startswith("TLS=")
        AGENTS[self.name] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str, backends: list[str]) -> Regions:
        assert kind == "DRAM" and backends == ["UCX"]
        self.memory = [region[:3] for region in regions]
        return self.memory

    def deregister_memory(self, memory: Regions, backends: list[str]) -> None:
        assert memory is self.memory and backends == ["UCX"] and not self.known
        self.memory = []
        del AGENTS[self.name]

    def get_partial_agent_metadata(self, memory: Regions, connection: bool, backends: list[str]) -> bytes:
        assert memory is self.memory and connection is True and backends == ["UCX"]
        return MAGIC + self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if not metadata.startswith(MAGIC):
            raise nixlInvalidParamError("no metadata")
        self.known.add(metadata.removeprefix(MAGIC).decode())
        return metadata.removeprefix(MAGIC)

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def send_notif(self, name: str, note: bytes) -> None:
        assert name in self.known
        with LOCK:
            AGENTS[name].inbox.append((self.name, note))

    def get_new_notifs(self, backends: list[str]) -> dict[str, list[bytes]]:
        assert backends == ["UCX"]
        found = defaultdict[str, list[bytes]](list)
        with LOCK:
            for sender, item in self.inbox:
                if isinstance(item, Transfer):
                    ctypes.memmove(item.target, item.source, item.size)
                    item.state = "DONE"
                found[sender].append(item.note if isinstance(item, Transfer) else item)
            self.inbox.clear()
        return found

    def get_xfer_descs(self, regions: Regions, kind: str) -> Regions:
        assert kind == "DRAM"
        return regions

    def initialize_xfer(
        self, operation: str, ours: Regions, theirs: Regions, name: str, note: bytes, backends: list[str]
    ) -> Transfer:
        assert operation == "WRITE" and name in self.known and backends == ["UCX"]
        ((source, size, _),), ((target, same, _),), ((base, registered, _),) = ours, theirs, AGENTS[name].memory
        if size != same or not base <= target <= target + size <= base + registered:
            raise nixlInvalidParamError("memory that is not registered")
        return Transfer(source, target, size, name, note)

    def transfer(self, handle: Transfer) -> str:
        with LOCK:
            handle.state = "PROC"
            AGENTS[handle.peer].inbox.append((self.name, handle))
        return "PROC"

    def check_xfer_state(self, handle: Transfer) -> str:
        with LOCK:
            return handle.state
