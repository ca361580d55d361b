"""Commands become messages: adjacent puts are merged, and a flag rides on the last put before it.

    put 0..99, put 100..199                   1 message      source and target both go on where the last one ended
    put 0..99, put 120..199                   2 messages     a gap
    put 0..99, store                          1 message      the flag is seen once the bytes are there

Merging is what warps of a GPU do with neighbouring stores; riding halves the messages of a signalled put (UCCL-EP).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moe_mk.comm.network.command import MOST_BYTES, Op, TransferCommand
from moe_mk.comm.network.sequence import Kind

_KIND = {Op.PUT: Kind.PAYLOAD, Op.STORE: Kind.STORE, Op.ADD: Kind.ADD, Op.GET: Kind.GET}


@dataclass(eq=False)
class Taken:
    """A command that the proxy has read from its ring and that is not known to be done."""

    command: TransferCommand
    place: int
    """Its number in the ring."""
    number: int | None = None
    """The group it went out with, None before; written before the message is."""


@dataclass
class Message:
    """What goes to one peer at once."""

    peer: int
    kind: Kind
    size: int = 0
    source: int = 0
    at: int = 0
    """Where the bytes go; what a get asks for."""
    flag: int = 0
    value: int = 0
    taken: list[Taken] = field(default_factory=list)
    """The commands it carries out."""
    serial: int = -1
    """The number of its last command in the ring; -1 for a message that no command asked for."""


def messages_of(taken: Iterable[Taken], most_bytes: int = MOST_BYTES) -> list[Message]:
    """The fewest messages that carry commands out in their order for each peer."""
    made: list[Message] = []
    last_of: dict[int, Message] = {}
    for each in taken:
        command = each.command
        last = last_of.get(command.peer)
        if last is not None and _merged(last, command, most_bytes):
            last.taken.append(each)
            continue
        message = _message(command)
        message.taken.append(each)
        made.append(message)
        last_of[command.peer] = message
    return made


def _message(command: TransferCommand) -> Message:
    kind = _KIND[command.op]
    if command.op is Op.GET:  # the request carries no bytes; its length and target travel as the value
        value = command.source << 24 | command.size
        return Message(command.peer, kind, at=command.at, value=value)
    return Message(command.peer, kind, command.size, command.source, command.at, command.flag, command.value)


def _merged(last: Message, command: TransferCommand, most_bytes: int) -> bool:
    """Take a command into the message before it, if that can be."""
    if last.kind is not Kind.PAYLOAD:
        return False
    if command.op is Op.PUT:
        follows = (last.source + last.size, last.at + last.size) == (command.source, command.at)
        if not follows or last.size + command.size > most_bytes:
            return False
        last.size += command.size
        return True
    if command.op in (Op.STORE, Op.ADD):
        last.kind, last.flag, last.value = _KIND[command.op], command.flag, command.value
        return True
    return False
