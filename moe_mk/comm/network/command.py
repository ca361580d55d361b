"""A transfer command: 128 bits that say what to do, to whom, and where the bytes lie.

    put, get      op 4 | peer 8 | flag 12 | size 24 | source 40 | at 40
    store, add    op 4 | peer 8 | flag 12 | size 24 |  16 unused | value 64

A command is small so that a producer can pack one with two stores, whatever it moves; the proxy does the rest. The
split of duties, and a rank of 8 and a size of 24 bits in 128, are those of UCCL-EP.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from moe_mk.errors import UnsupportedError

COMMAND_BYTES = 16
FIELD_BITS = {"peer": 8, "flag": 12, "size": 24, "source": 40, "at": 40, "value": 64}
MOST_BYTES = (1 << FIELD_BITS["size"]) - 1
"""What one command may move."""
_FIELD_MASKS = {name: (1 << bits) - 1 for name, bits in FIELD_BITS.items()}
_WORD = (1 << 64) - 1


class Op(IntEnum):
    """What a command asks for. Zero is none, so that memory nobody has written is no command."""

    PUT = 1
    """Bytes of this rank to a peer."""
    STORE = 2
    """A word into a flag of a peer, after all puts to it before."""
    ADD = 3
    """A number onto a counter of a peer, after all puts to it before."""
    GET = 4
    """Bytes of a peer to this rank, after all puts to it before."""


CARRIES_VALUE = frozenset({Op.STORE, Op.ADD})


@dataclass(frozen=True, slots=True)
class TransferCommand:
    """One request of a producer to its proxy. Raises UnsupportedError with every field that is out of its limits."""

    op: Op
    peer: int
    size: int = 0
    """Bytes to move."""
    source: int = 0
    """Where they lie in this rank's registered memory; for a get, where they shall lie."""
    at: int = 0
    """Where they go in the data of the peer's window; for a get, where they lie there."""
    flag: int = 0
    value: int = 0

    def __post_init__(self) -> None:
        unused = ("source", "at") if self.op in CARRIES_VALUE else ("value",)
        over = [
            f"{name}={number} does not fit {FIELD_BITS[name]} bits: 0 to {mask}"
            for name, mask in _FIELD_MASKS.items()
            if not 0 <= (number := getattr(self, name)) <= mask
        ]
        over += [f"{name}={number} has no place in it" for name in unused if (number := getattr(self, name))]
        if over:
            raise UnsupportedError(f"a {self.op.name} command cannot be packed into {COMMAND_BYTES * 8} bits", over)

    def pack(self) -> tuple[int, int]:
        """The two words of a command."""
        body = self.value if self.op in CARRIES_VALUE else self.source << FIELD_BITS["at"] | self.at
        head = self.op | self.peer << 4 | self.flag << 12 | self.size << 24
        return head | (body >> 64) << 48, body & _WORD

    @classmethod
    def unpack(cls, first: int, second: int) -> TransferCommand:
        """The command of two words. Raises UnsupportedError for words that are none."""
        try:
            op = Op(first & 0xF)
        except ValueError as problem:
            raise UnsupportedError("two words are no command", [f"op={first & 0xF} is none of {[*Op]}"]) from problem
        peer, flag, size = first >> 4 & 0xFF, first >> 12 & 0xFFF, first >> 24 & MOST_BYTES
        if op in CARRIES_VALUE:
            return cls(op, peer, size, flag=flag, value=second)
        body = (first >> 48) << 64 | second
        return cls(op, peer, size, body >> FIELD_BITS["at"], body & _FIELD_MASKS["at"], flag)

    def to_bytes(self) -> bytes:
        """The command as it lies in memory."""
        return b"".join(word.to_bytes(8, "little") for word in self.pack())
