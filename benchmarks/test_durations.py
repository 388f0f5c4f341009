"""Write a table of the seconds that the tests of each file take, from pytest's own record of a run.

    pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not slow" --junitxml RECORD.xml
    python benchmarks/test_durations.py RECORD.xml TABLE.csv

Set-up and tear-down count. Three processes ran the tests, so the whole takes a third of the sum.
"""

import sys
from xml.etree import ElementTree

import pandas as pd


def main() -> None:
    """Read the record that the first argument names, and write the table that the second one names."""
    record, table = sys.argv[1:]
    cases = ElementTree.parse(record).getroot().iter("testcase")  # noqa: S314  # one's own record
    frame = pd.DataFrame([{"file": one.get("classname"), "seconds": float(one.get("time", 0))} for one in cases])
    summed = frame.groupby("file")["seconds"].agg(["size", "sum", "max"]).sort_values("sum", ascending=False)
    summed.columns = ["num_tests", "seconds", "seconds_of_slowest"]
    summed.round(1).to_csv(table)


if __name__ == "__main__":
    main()
