"""A picture of the house as SVG: rooms on their floors, and an arrow for every import that no other arrow implies.

The picture depends on the names of rooms, on their floors and on which room imports which, on nothing else, so that it
goes stale only when one of these changes. An arrow from a to c is left out where arrows from a to b and from b to c are
there (the transitive reduction of a graph without circles). Arrows along a floor are dashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

WIDTH, MARGIN, HEIGHT, BETWEEN, GAP = 1180, 40, 38, 62, 26
"""Of the picture, its edges, a box, the space between two floors, and the least space between two boxes."""
LETTER = 8.2
"""Width of a letter of a name."""
COLOURS = ("#4e79a7", "#b07a2a", "#59874f", "#a5505a", "#7a5c99", "#3f8c8c", "#8a6d3b", "#666666")
"""Of floors from the ground up; an arrow has the colour of the floor it leads to."""
PASSES = 12


@dataclass(frozen=True)
class Box:
    """A room's place: left edge, top edge, width."""

    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        """Of its width."""
        return self.x + self.width / 2


def draw(floors: Sequence[Sequence[str]], imports: Iterable[tuple[str, str]]) -> str:
    """The picture. floors: names of rooms from the ground up. imports: (room, room it imports)."""
    floor_of = {room: number for number, rooms in enumerate(floors) for room in rooms}
    known = {(one, other) for one, other in imports if one != other and one in floor_of and other in floor_of}
    arrows = sorted(reduced(known))
    boxes = _placed(_ordered(floors, arrows, floor_of))
    height = 2 * MARGIN + len(floors) * (HEIGHT + BETWEEN) - BETWEEN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<title>Packages of moe_mk on their floors; arrows are imports, those that others imply are left out</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        "<defs>",
        *(_arrowhead(number) for number in range(len(floors))),
        "</defs>",
    ]
    for number in range(len(floors)):
        y = _top(number, len(floors)) - 10
        lines.append(
            f'<rect x="12" y="{y:.0f}" width="{WIDTH - 24}" height="{HEIGHT + 20}" rx="4" fill="{COLOURS[number % 8]}" '
            'fill-opacity="0.07"/>'
        )
    lines += [_arrow(one, other, boxes, floor_of, floors) for one, other in arrows]
    lines += [_box(room, boxes[room], floor_of[room]) for rooms in floors for room in sorted(rooms)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def reduced(arrows: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Arrows of a graph without circles that no path over other arrows implies."""
    graph: dict[str, set[str]] = {}
    for one, other in arrows:
        graph.setdefault(one, set()).add(other)
    below: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in below:
            below[room] = set()
            below[room] = {found for other in graph.get(room, ()) for found in {other, *reach(other)}}
        return below[room]

    implied = {
        (room, other)
        for room, others in graph.items()
        for other in others
        if any(other in reach(between) for between in others if between != other)
    }
    return {(room, other) for room, others in graph.items() for other in others} - implied


def _ordered(
    floors: Sequence[Sequence[str]], arrows: Sequence[tuple[str, str]], floor_of: Mapping[str, int]
) -> list[list[str]]:
    """Rooms of each floor near those that they have arrows with (barycentres, in passes up and down)."""
    rows = [sorted(rooms) for rooms in floors]
    near: dict[str, list[str]] = {room: [] for room in floor_of}
    for one, other in arrows:
        near[one].append(other)
        near[other].append(one)
    for turn in range(PASSES):
        for number in range(len(rows)) if turn % 2 else reversed(range(len(rows))):
            at = {room: (n + 0.5) / len(row) for row in rows for n, room in enumerate(row)}

            def wanted(room: str, at: Mapping[str, float] = at) -> tuple[float, str]:
                others = [at[other] for other in near[room]]
                return (sum(others) / len(others) if others else at[room], room)

            rows[number] = sorted(rows[number], key=wanted)
    return rows


def _placed(rows: Sequence[Sequence[str]]) -> dict[str, Box]:
    """Boxes as wide as their names, spread evenly over their floor."""
    boxes: dict[str, Box] = {}
    for number, row in enumerate(rows):
        widths = [LETTER * len(room) + 22 for room in row]
        space = (WIDTH - 2 * MARGIN - sum(widths)) / (len(row) + 1)
        x = MARGIN + max(space, GAP)
        for room, width in zip(row, widths, strict=True):
            boxes[room] = Box(x, _top(number, len(rows)), width)
            x += width + max(space, GAP)
    return boxes


def _top(number: int, count: int) -> float:
    return MARGIN + (count - 1 - number) * (HEIGHT + BETWEEN)


def _arrow(
    one: str, other: str, boxes: Mapping[str, Box], floor_of: Mapping[str, int], floors: Sequence[Sequence[str]]
) -> str:
    """A line from the bottom of a room to the top of another, through gaps between the boxes of floors on its way."""
    start, end, colour = boxes[one], boxes[other], floor_of[other]
    if floor_of[one] == floor_of[other]:
        return _along(one, other, start, end, colour)
    points = [(start.middle, start.y + HEIGHT)]
    passed = range(floor_of[one] - 1, floor_of[other], -1)
    for step, number in enumerate(passed, 1):
        wish = start.middle + (end.middle - start.middle) * step / (len(passed) + 1)
        x = _nearest(wish, _gaps([boxes[room] for room in floors[number]]))
        points += [(x, _top(number, len(floors)) - 4), (x, _top(number, len(floors)) + HEIGHT + 4)]
    points.append((end.middle, end.y - 3))
    path = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x, y), (to_x, to_y) in zip(points[::2], points[1::2], strict=True):
        bend = (to_y - y) * 0.55
        path += f" L{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"
    return _line(one, other, path, colour)


def _along(one: str, other: str, start: Box, end: Box, colour: int) -> str:
    """An arrow on one floor: an arc above the boxes, away from the middles that arrows from above lead to."""
    right = end.x > start.x
    x, to_x = (start.x + start.width - 8, end.x + 8) if right else (start.x + 8, end.x + end.width - 8)
    rise = start.y - 12 - 0.03 * abs(to_x - x)
    path = f"M{x:.0f} {start.y:.0f} C{x:.0f} {rise:.0f} {to_x:.0f} {rise:.0f} {to_x:.0f} {end.y - 3:.0f}"
    return _line(one, other, path, colour, dashes=' stroke-dasharray="5 3"')


def _line(one: str, other: str, path: str, colour: int, dashes: str = "") -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{COLOURS[colour % 8]}" stroke-width="1.4" stroke-opacity="0.75"{dashes} '
        f'marker-end="url(#to{colour})"><title>{escape(one)} imports {escape(other)}</title></path>'
    )


def _nearest(wish: float, gaps: Sequence[float]) -> float:
    return min(gaps, key=lambda gap: (abs(gap - wish), gap))


def _gaps(boxes: Sequence[Box]) -> list[float]:
    """Where arrows pass a floor: between its boxes, and beside them."""
    row = sorted(boxes, key=lambda box: box.x)
    between = [(one.x + one.width + other.x) / 2 for one, other in pairwise(row)]
    return [row[0].x - GAP / 2, *between, row[-1].x + row[-1].width + GAP / 2]


def _arrowhead(number: int) -> str:
    return (
        f'<marker id="to{number}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{COLOURS[number % 8]}"/></marker>'
    )


def _box(room: str, box: Box, floor: int) -> str:
    return (
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{HEIGHT}" rx="5" fill="white" '
        f'stroke="{COLOURS[floor % 8]}" stroke-width="1.6"/>'
        f'<text x="{box.middle:.0f}" y="{box.y + 24:.0f}" font-size="14" text-anchor="middle" fill="#222">'
        f"{escape('moe_mk' if room == '__init__' else room)}</text>"
    )
