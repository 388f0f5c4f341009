"""Disables the garbage collector of the fork server before it imports anything; only the server imports this module.

`fork_server.begin_child` enables the collector in each forked process, as the documentation of gc.freeze recommends.
"""

import gc

gc.disable()
