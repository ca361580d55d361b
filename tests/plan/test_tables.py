"""Tables of docs/plan.md: ways to move bytes, and layouts of sixteen devices."""

from collections import Counter
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def table(title: str) -> list[dict[str, str]]:
    """The rows of the first table of a section, by head."""
    section = PAGE.split(f"# {title}\n", 1)[1].split("\n#", 1)[0]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    heads = [head.strip() for head in lines[0]]
    return [dict(zip(heads, (cell.strip() for cell in line), strict=True)) for line in lines[2:]]


MOVERS = {row["Method"]: row for row in table("Methods to move bytes")}


@pytest.mark.row(63)
def test_five_ways_to_move_bytes_by_what_drives_them_and_how_far_they_reach() -> None:
    assert len(MOVERS) == 5
    assert [name for name, row in MOVERS.items() if row["Needs the CPU"] == "no"] == ["NVSHMEM put and get"]
    cluster = {name for name, row in MOVERS.items() if row["Scope"] == "cluster"}
    assert cluster == {"NCCL all-to-all", "NVSHMEM put and get", "MPI all-to-all"}
    assert [name for name, row in MOVERS.items() if row["GPU direct"] == "no"] == ["MPI all-to-all"]


@pytest.mark.row(57)
def test_small_copies_through_a_window_and_through_the_driver() -> None:
    costs = {name: row["Fixed cost"] for name, row in MOVERS.items() if row["Fixed cost"] != "-"}
    assert costs == {"cudaMemcpy": "7 us", "GDRCopy, device memory mapped through the BAR": "1 us"}


@pytest.mark.row(56)
def test_collectives_and_puts_are_compared_property_by_property() -> None:
    collective, put = "NCCL all-to-all", "NVSHMEM put and get"
    rows = {row[""]: (row[collective], row[put]) for row in table("Collectives against one-sided puts")}
    assert rows["can be started by a running kernel"] == rows["without participation of the receiver"] == ("no", "yes")
    assert rows["needs a CPU thread for every transfer"] == ("yes", "no") and rows["scope"] == ("cluster", "cluster")
    for head, title in (("Needs the CPU", "needs a CPU thread for every transfer"), ("Scope", "scope")):
        assert rows[title] == (MOVERS[collective][head], MOVERS[put][head])


@pytest.mark.row(30)
def test_sixteen_devices_own_every_slice_and_read_every_shard() -> None:
    # As in the figure: entry d of a layout is (expert, slice, shard) of device d.
    owned = {
        "data": [(0, 0, d) for d in range(16)],
        "model": [(0, d, 0) for d in range(16)],
        "model+data": [(0, d % 4, d // 4) for d in range(16)],
        "expert+data": [(d, 0, d) for d in range(16)],
        "expert+model+data": [(d // 4, d % 4, d // 4) for d in range(16)],
    }
    for row in table("Layouts of sixteen devices"):
        devices = owned.pop(row["layout"])
        experts, slices, copies, shards = (int(value) for value in list(row.values())[1:5])
        assert (experts, slices, shards) == tuple(len(set(numbers)) for numbers in zip(*devices, strict=True))
        assert set(Counter(device[:2] for device in devices).values()) == {copies}
        assert set(Counter(device[2] for device in devices).values()) == {16 // shards}
    assert not owned
