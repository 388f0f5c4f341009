"""One framework a file: accelerate.py holds class Accelerate. There is no list to edit."""
