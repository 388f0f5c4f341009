"""The memory breakdown of a peak as tables and a panel, for profiles and plans."""

from collections.abc import Mapping
from functools import partial

import pandas as pd

from pipeline.base.units import MIB
from pipeline.memory.breakdown import Breakdown
from pipeline.memory.timeline import CATEGORIES
from pipeline.report.plot import Panel, bars_of, colour
from pipeline.report.table import Table


def categories_of(peak: Breakdown) -> dict[str, int]:
    """Return the bytes of each category at the peak, in the order of CATEGORIES."""
    return {name: peak.category_bytes[name] for name in CATEGORIES if name in peak.category_bytes}


def categories_panel(peak: Breakdown) -> Panel:
    """Return a bar for each category."""
    sizes = categories_of(peak)
    shades = [colour(CATEGORIES.index(name)) for name in sizes]
    return partial(bars_of, values=in_mib(sizes), title="at the peak, by category", unit="MiB", shades=shades)


def shares_table(name: str, title: str, sizes: Mapping[str, int]) -> Table:
    """Return a table of sizes in MiB and in percent of their sum."""
    total = sum(sizes.values())
    lines = [{name: key, "MiB": size / MIB, "%": 100 * size / total} for key, size in sizes.items()]
    return Table(name=name, title=title, frame=pd.DataFrame(lines), forms={"MiB": "{:,.2f}", "%": "{:.1f}"})


def tensors_table(name: str, title: str, peak: Breakdown) -> Table:
    """Return a table of the largest tensors alive at the peak, with the module and operator that made them."""
    lines = [
        {
            "MiB": tensor.num_bytes / MIB,
            "shape": " x ".join(map(str, tensor.shape)),
            "dtype": tensor.dtype,
            "category": tensor.category,
            "module": tensor.module,
            "operator": tensor.operator,
        }
        for tensor in peak.largest
    ]
    return Table(name=name, title=title, frame=pd.DataFrame(lines), forms={"MiB": "{:,.2f}"})


def in_mib(sizes: Mapping[str, int]) -> dict[str, float]:
    """Return bytes as MiB."""
    return {name: size / MIB for name, size in sizes.items()}
