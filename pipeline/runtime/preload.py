"""Imports in the fork server what its processes need, with the garbage collector off; only the server imports this.

`fork_server.begin_child` enables the collector in each forked process, as the documentation of gc.freeze recommends.
"""

import gc

from pipeline.runtime.fork_server import preload

gc.disable()
preload()
