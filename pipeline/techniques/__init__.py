"""One technique per file: precision.py holds class Precision. There is no list to edit.

Techniques are applied in the order of their stages, and within a stage in the order of their names.
"""
