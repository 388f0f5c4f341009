"""One technique a file: precision.py holds class Precision. There is no list to edit.

Techniques replace different parts of a Step, so the order in which they are applied does not matter.
"""
