"""One corpus per file: python_docs.py holds class PythonDocs. There is no list to edit."""
