"""A search replayed on the table of a completely measured space."""
