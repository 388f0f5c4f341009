"""Loading without looking for garbage: what is loaded stays, and looking through it again and again takes a second.

Importing this switches Python's collector off, in a process that loads for others and then is forked; each of these
calls loaded(). Python's documentation of gc.freeze gives the recipe.
"""

import gc

gc.disable()


def loaded() -> None:
    """Look for garbage from here on, but never in what has been loaded."""
    gc.freeze()
    gc.enable()
