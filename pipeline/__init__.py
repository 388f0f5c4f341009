"""Fitproof: the fastest way to train a model in the GPU memory you have, found and proven."""

import logging

# peft imports bitsandbytes, which says on a CPU that it has no kernel for inference.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
