"""NVIDIA's functions: which are modelled, which need no answer, and what answers all others.

A function that only puts work on a card, changes a setting, destroys something or answers zero is done when it returns
success. Any other that the C sources do not define is remembered when it is called: its outputs are set to zero where
its header says what they are; where it has none, it fails if its name says that it answers something.
"""

import re

PREFIX = re.compile(r"_*cu(?:da|blas|dnn|fft|rand|solver|sparse|pti|File|[A-Z])|nccl|nvrtc|nvml|nvJitLink|nvshmem|nvtx")
"""How the names of NVIDIA's functions begin."""
NEEDS_NO_ANSWER = re.compile(
    r"""
    __cuda(?:InitModule|RegisterFatBinaryEnd|RegisterVar|UnregisterFatBinary)
    |cuda(?:Peek|Get)(?:AtLast|Last)Error
    |cuda\w*(?:Synchronize|Destroy|Unload|Launch|SetAttribute\w*|SetAccess|SetLimit|SetCacheConfig|SetSharedMemConfig)
    |cuda(?:EventQuery|StreamQuery|StreamWaitEvent|FuncSet\w+|Host(?:Unr|R)egister|MemPrefetchAsync|MemAdvise)
    |cuda(?:MemPoolTrimTo|ProfilerSt\w+|DeviceSet\w+|ThreadExchangeStreamCaptureMode)
    |cuda(?:DeviceCanAccessPeer|StreamGetPriority|DeviceGetStreamPriorityRange)
    |cuda(?:MemcpyToSymbol\w*|KernelSetAttributeForDevice|StreamUpdateCaptureDependencies|DeviceReset|SetDeviceFlags)
    |cu\w*(?:Synchronize|Destroy|Unload|SetLimit|SetCacheConfig|SetSharedMemConfig|SetAccess)(?:_v\d)?
    |cu(?:MemMap|MemUnmap|FuncSetAttribute|KernelSetAttribute|StreamWaitEvent|StreamQuery|EventQuery)
    |cu(?:EventRecord\w*|MemPrefetchAsync\w*|TensorMap\w+|DevicePrimaryCtx(?:Release|SetFlags)\w*|MemsetD\d+\w*)
    |cu(?:Stream(?:Write|Wait)Value\w+|ProfilerSt\w+|Logs\w+)
    |cublas(?!Get|Create|\w*gels|\w*rotm?g_|Lt)\w+
    |cublasLt(?:Matmul|\w+Set\w+|\w*Destroy|MatrixTransform)
    |cudnn(?:Set|Destroy|Conv|Batch|Pooling|RNN|CTC|Spatial|Restore)\w+|cudnnBackend(?:Execute|Finalize)
    |cufft(?:Set\w+|Destroy|Xt?Exec\w*)
    |curand(?:Set|Destroy|Generate)\w+
    |cusolver(?!\w*bufferSize|\w*Create|\w*Get)\w+
    |cusparse(?:Set|Destroy|DnMatSet|SpMatSet|CsrSet)\w+|cusparse\w+_(?:analysis|solve)|cusparse[SDCZX](?!\w*(?:Ext|Nnz|Size))\w+
    |cusparse(?:SpMM|SpMV|SpSV_solve|SpSM_solve|SDDMM|SDDMM_preprocess|CreateIdentityPermutation)
    |cupti(?!ActivityGetNextRecord|Get)\w+
    |nccl(?:All\w+|Reduce\w*|B\w*cast|Send|Recv|Group\w+|Comm(?:Abort|Destroy|Finalize|Deregister|Suspend|Resume))
    |ncclRedOpDestroy|nvml(?:Init|Shutdown)\w*
    """,
    re.VERBOSE,
)
WRITES = re.compile(
    r"(?:cublas|cudnn|cufft|cusolver|cusparse|curand)(?!\w*Set)|nccl(?!Group|Comm)|cu\w*(?:Memset|Memcpy|Launch)"
)
"""Of these, functions that may write to a card's memory."""
CREATES = re.compile(r"(?:cublas|cudnn|cusolver|cusparse(?!Lt))\w*[cC]reate(?!Identity)\w*")
DESTROYS = re.compile(r"(?:cublas|cudnn|cusolver|cusparse(?!Lt))\w*[dD]estroy\w*")
"""Functions whose first parameter is where a new handle is put, and whose only one is a handle."""
DESCRIBES = re.compile(r"\w+Get(?:LastError|ErrorString|ErrorName|Status\w+|ResultString)")
"""Functions that return a text."""
ANSWERS = re.compile(
    r"Get|Create|Size|Query|Init|Estimat|Find|Version|Nnz|malloc|Malloc|Alloc|_ptr|n_pes|Import|Export"
)
"""Names of functions that leave something in their caller's variables or return it."""
DECLARED = re.compile(r"\b(CUresult|cudaError_t)\s+(\w+)\s*\(([^;{}]*)\)\s*;")
OUTPUT = re.compile(r"(?P<type>.*[\w*]\s*)\*\s*(?P<name>\w+)")
"""A parameter that points to one value of a known size."""


INTERFACE = """
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cuda_runtime_api.h>
"""
"""What includes the headers of the runtime and of the driver."""
HEADING = """
#include <stdlib.h>
#include <string.h>
#include "card.h"
#define WEAK __attribute__((weak))
"""
"""What stands before the definitions, which the sources replace where they define such a function."""


def of_headers(preprocessed: str) -> dict[str, str]:
    """Return definitions of the functions that preprocessed headers declare, by name; they set outputs to zero."""
    found = {}
    for result, name, text in DECLARED.findall(preprocessed):
        parameters = [" ".join(one.split()) for one in text.split(",")]
        outputs = [one["name"] for one in map(OUTPUT.fullmatch, parameters) if one and _is_output(one["type"])]
        zeros = "".join(f"if ({output}) memset({output}, 0, sizeof *{output}); " for output in outputs)
        found[name] = f"WEAK {result} {name}({', '.join(parameters)}) {{ {zeros}{_noted(name)} return 0; }}\n"
    return found


def _is_output(pointee: str) -> bool:
    return "const" not in pointee and pointee.strip() not in ("void", "char", "unsigned char")


def by_name(name: str) -> str:
    """Return the definition of a function without a header."""
    if CREATES.fullmatch(name):
        return f"WEAK int {name}(void **made) {{ *made = card_new(CARD_HANDLE_BYTES); return 0; }}\n"
    if DESTROYS.fullmatch(name):
        return f"WEAK int {name}(void *handle) {{ free(handle); return 0; }}\n"
    if DESCRIBES.fullmatch(name):
        return f'WEAK const char *{name}(int status) {{ return "an error of the simulated card"; }}\n'
    fails = ANSWERS.search(name) and not NEEDS_NO_ANSWER.fullmatch(name)
    return f"WEAK long {name}(void) {{ {_noted(name)} return {int(bool(fails))}; }}\n"


def _noted(name: str) -> str:
    if not NEEDS_NO_ANSWER.fullmatch(name):
        return f'card_unmodelled("{name}");'
    return "card_launched();" if WRITES.match(name) else ""
