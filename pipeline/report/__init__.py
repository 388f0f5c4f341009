"""Rows -> tables and figures. A file named like an entry point adds what that technique alone can tell."""
