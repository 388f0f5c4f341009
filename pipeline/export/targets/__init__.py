"""One framework per file: accelerate.py holds class Accelerate. There is no list to edit."""
