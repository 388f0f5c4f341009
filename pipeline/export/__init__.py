"""Handing over: the same training as files that other frameworks take, and as a script that needs none."""
