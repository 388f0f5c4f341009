"""A search replayed on a table of a space that was measured in whole."""
