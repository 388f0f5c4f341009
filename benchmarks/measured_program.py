"""Runs a script as its own main program, and writes down what it took of the GPU: started by programs_on_gpu.py.

python benchmarks/measured_program.py RESULT.json script.py ARGUMENTS
"""

import json
import runpy
import sys
import time
from pathlib import Path

import torch


def main() -> None:
    """Run the script and write the peaks of the allocator."""
    result, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    begin = time.monotonic()
    runpy.run_path(script, run_name="__main__")
    torch.cuda.synchronize()
    taken = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "seconds": time.monotonic() - begin,
    }
    Path(result).write_text(json.dumps(taken))


if __name__ == "__main__":
    main()
