"""A command of 128 bits: by hand, there and back at random, and every field at its limit and beyond."""

import random

import pytest

from moe_mk.comm.network.command import COMMAND_BYTES, FIELD_BITS, Op, TransferCommand
from moe_mk.errors import UnsupportedError


@pytest.mark.row(151)
def test_the_fields_lie_where_the_drawing_has_them() -> None:
    # op 1 | peer 2 << 4 | size 3 << 24; source 5 and at 7 make a body of 80 bits, 5 << 40 | 7, its upper 16 are 0
    command = TransferCommand(Op.PUT, peer=2, size=3, source=5, at=7)
    assert command.pack() == (1 | 2 << 4 | 3 << 24, 5 << 40 | 7)
    high = TransferCommand(Op.PUT, peer=0, source=1 << 39)  # bit 79 of the body: the last bit of the first word
    assert high.pack() == (1 | 1 << 63, 0)
    assert TransferCommand(Op.STORE, peer=1, flag=9, value=(1 << 64) - 1).pack() == (
        2 | 1 << 4 | 9 << 12,
        (1 << 64) - 1,
    )
    assert COMMAND_BYTES == 16


def a_command(draw: random.Random) -> TransferCommand:
    def any_of(name: str) -> int:
        most = (1 << FIELD_BITS[name]) - 1
        return draw.choice((0, 1, most, draw.randint(0, most)))

    op = draw.choice([*Op])
    fields = ("peer", "flag", "size", *(("value",) if op in (Op.STORE, Op.ADD) else ("source", "at")))
    return TransferCommand(op, **{name: any_of(name) for name in fields})


@pytest.mark.row(151)
def test_whatever_is_packed_is_unpacked() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        command = a_command(draw)
        words = command.pack()
        assert all(0 <= word < 1 << 64 for word in words)
        assert TransferCommand.unpack(*words) == command


@pytest.mark.row(151)
@pytest.mark.parametrize("name", FIELD_BITS)
def test_each_field_has_a_limit_that_is_named(name: str) -> None:
    op, most = Op.STORE if name == "value" else Op.PUT, (1 << FIELD_BITS[name]) - 1
    fields = {"peer": 0, name: most}
    assert TransferCommand(op, **fields) == TransferCommand.unpack(*TransferCommand(op, **fields).pack())
    for beyond in (most + 1, -1):
        text = rf"a {op.name} command cannot be packed into 128 bits\n  - {name}={beyond} does not fit"
        with pytest.raises(UnsupportedError, match=text):
            TransferCommand(op, **{**fields, name: beyond})


def test_all_limits_are_reported_at_once() -> None:
    with pytest.raises(UnsupportedError) as reported:
        TransferCommand(Op.PUT, peer=256, size=1 << 24, value=3)
    assert reported.value.reasons == (
        "peer=256 does not fit 8 bits: 0 to 255",
        "size=16777216 does not fit 24 bits: 0 to 16777215",
        "value=3 has no place in it",
    )


def test_memory_that_nobody_has_written_is_no_command() -> None:
    with pytest.raises(UnsupportedError, match="two words are no command"):
        TransferCommand.unpack(0, 0)
