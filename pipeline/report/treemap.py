"""A treemap: rectangles whose areas are the memory of modules, divided by category."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import altair as alt

from pipeline.base.units import MIB
from pipeline.memory.breakdown import ModuleMemory
from pipeline.report.course import category_scale
from pipeline.report.plot import ABOUT, Panel, Plot, data, layered, mib_text

HEIGHT = 320
ASPECT = 2.1
"""Width by height for which rectangles are as square as possible; in pixels they are stretched to the page."""
CHARACTER_PIXELS, LINE_PIXELS = 7, 14
NUM_TEXTS = 5
"""Texts of a box, of which the first that fits is shown."""
FITTING = "".join(
    f"isValid(datum.needed_{number}) && datum.needed_{number} <= width ? datum.text_{number} : "
    for number in range(NUM_TEXTS)
)
FITTING += "''"
DARK = ("parameters",)
"""Categories whose colour needs white text."""


class Rectangle(NamedTuple):
    """A rectangle by its left upper corner."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], place: Rectangle) -> list[Rectangle]:
    """Return rectangles that fill `place`, with areas proportional to sizes, which are positive and descend.

    Each row along the shorter side takes further rectangles as long as the worst of them gets more square (Bruls,
    Huizing and van Wijk 2000, Squarified Treemaps).
    """
    found: list[Rectangle] = []
    x, y, width, height = place
    left = list(sizes)
    while left:
        side = min(width, height)
        area = width * height / sum(left)
        row = left[:1]
        while len(row) < len(left) and _worst(left[: len(row) + 1], area, side) <= _worst(row, area, side):
            row = left[: len(row) + 1]
        thickness, offset = sum(row) * area / side, 0.0
        for size in row:
            length = size * area / thickness
            if width >= height:
                found.append(Rectangle(x, y + offset, thickness, length))
            else:
                found.append(Rectangle(x + offset, y, length, thickness))
            offset += length
        if width >= height:
            x, width = x + thickness, width - thickness
        else:
            y, height = y + thickness, height - thickness
        left = left[len(row) :]
    return found


def _worst(row: Sequence[float], area: float, side: float) -> float:
    """Return the largest ratio of the sides in a row of rectangles along `side`."""
    thickness = sum(row) * area / side
    lengths = [size * area / thickness for size in row]
    return max(max(thickness / length, length / thickness) for length in lengths)


def without_numbers(name: str) -> str:
    """Return a module's name with * for the number of its layer, so that identical layers add up."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def treemap_plot(
    modules: Sequence[ModuleMemory], title: str = "memory at the peak, by module (* any layer) and category"
) -> Plot:
    """Return the modules at the peak, each divided by category; identical layers are one."""
    sizes: dict[str, Counter[str]] = {}
    for one in modules:
        sizes.setdefault(without_numbers(one.module) or "the whole model", Counter())[one.category] += one.num_bytes
    ordered = sorted(sizes, key=lambda name: -sizes[name].total())
    total = sum(size.total() for size in sizes.values())
    lines, labels = [], []
    whole = Rectangle(0, 0, ASPECT, 1)
    for name, place in zip(ordered, squarified([sizes[name].total() for name in ordered], whole), strict=True):
        parts = sizes[name].most_common()
        inside = squarified([size for _, size in parts], place)
        written = [_written(name, sizes[name].total()), *(_written(category, size) for category, size in parts[1:])]
        for (category, size), part, texts in zip(parts, inside, written, strict=True):
            about = f"{name}\n{category}: {mib_text(size / MIB)}, {100 * size / total:.1f} % of the peak"
            lines.append(_corners(part) | {"category": category, "about": about})
            shade = "white" if category in DARK else "black"
            labels.append(_corners(part) | {"shade": shade} | _fitting(texts, part))
    return Panel(title=title, chart=_chart(lines, labels), height=HEIGHT).alone("modules", is_wide=True)


def _written(name: str, num_bytes: int) -> list[str]:
    """Return texts for a box, the longest first."""
    size = mib_text(num_bytes / MIB)
    folder, _, file = name.rpartition("/")
    full, last = (name, file) if folder else (".".join(name.split(".")[-2:]), name.rpartition(".")[2])
    return [f"{full}\n{size}", f"{last}\n{size}", f"{last} {size}", last, size]


def _fitting(texts: Sequence[str], place: Rectangle) -> dict[str, object]:
    """Return the texts that are not too high for a box, each with the width that it needs of the page, in pixels."""
    num_lines = int((place.height * HEIGHT - 6) // LINE_PIXELS)
    fields: dict[str, object] = {}
    for number, text in enumerate(texts):
        pixels = CHARACTER_PIXELS * max(map(len, text.split("\n"))) + 8
        needed = pixels * ASPECT / place.width if text.count("\n") < num_lines else None
        fields |= {f"text_{number}": text, f"needed_{number}": needed}
    return fields


def _corners(place: Rectangle) -> dict[str, object]:
    x, y, width, height = place
    return {"x": round(x, 5), "x2": round(x + width, 5), "y": round(y, 5), "y2": round(y + height, 5)}


def _chart(lines: Sequence[dict[str, object]], labels: Sequence[dict[str, object]]) -> alt.LayerChart:
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, ASPECT], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[1, 0], nice=False))
    return layered(
        alt.Chart(data(lines))
        .mark_rect(stroke="white", strokeWidth=1)
        .encode(
            x=x,
            x2="x2:Q",
            y=y,
            y2="y2:Q",
            color=alt.Color("category:N", scale=category_scale({str(line["category"]) for line in lines})),
            **ABOUT,
        ),
        alt.Chart(data(labels))
        .transform_calculate(text=FITTING)
        .mark_text(align="left", baseline="top", dx=4, dy=4, lineBreak="\n")
        .encode(x=x, y=y, text="text:N", color=alt.Color("shade:N", scale=None)),
    )
