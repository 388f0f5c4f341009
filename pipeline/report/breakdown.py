"""The memory breakdown of a peak as tables, for profiles and plans."""

from collections.abc import Mapping

from pipeline.base.units import MIB
from pipeline.memory.breakdown import Breakdown
from pipeline.memory.timeline import CATEGORIES
from pipeline.report.table import Table


def categories_of(peak: Breakdown) -> dict[str, int]:
    """Return the bytes of each category at the peak, in the order of CATEGORIES."""
    return {name: peak.category_bytes[name] for name in CATEGORIES if name in peak.category_bytes}


def shares_table(name: str, title: str, sizes: Mapping[str, int]) -> Table:
    """Return a table of sizes in MiB and in percent of their sum."""
    total = sum(sizes.values())
    lines = [{name: key, "MiB": size / MIB, "%": 100 * size / total} for key, size in sizes.items()]
    return Table.of(name, title, lines, forms={"MiB": "{:,.2f}", "%": "{:.1f}"})


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
    return Table.of(name, title, lines, forms={"MiB": "{:,.2f}"})
