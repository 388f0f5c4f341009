"""The library of the simulated card, compiled for one build of torch and kept in the cache folder.

It replaces NVIDIA's libraries. Beside it there is an empty one for each of these that torch and others are linked to,
with its name and versions of symbols. All are loaded before a process begins, so nobody looks for NVIDIA's own.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import cache_folder
from pipeline.simulation.elf import SharedLibrary, read_library
from pipeline.simulation.functions import HEADING, INTERFACE, PREFIX, by_name, of_headers
from pipeline.simulation.torch_build import TorchBuild

SOURCES = Path(__file__).parent / "library"
PROGRAMS = Path(__file__).parent / "programs"
MADE_BY = [Path(__file__).with_name(f"{module}.py") for module in ("library", "functions", "elf", "torch_build")]
"""The C sources of the library and of programs beside it, and the modules that make others of torch's libraries."""
MAX_CARDS = 16
"""Cards that a simulated machine may have."""
FILE_NAME = "libsimulated_card.so"
OPENED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")
"""The driver's libraries, which torch, Triton and pynvml open when they need them."""
NVIDIAS = (
    *("libcuda.so", "libcudart.so", "libcublas", "libcudnn", "libcufft", "libcurand.so", "libcusolver", "libcusparse"),
    *("libcupti.so", "libcufile", "libnccl.so", "libnvrtc", "libnvJitLink.so", "libnvshmem", "libnvToolsExt.so"),
    "libnvidia-ml.so",
)
"""How the names of NVIDIA's libraries begin."""


def preloaded(folder: Path) -> tuple[Path, ...]:
    """Return the libraries of a folder, which are loaded before a process begins, the one that is not empty first."""
    own = folder / FILE_NAME
    return (own, *sorted(file for file in folder.glob("*.so*") if file != own and not file.is_symlink()))


def programs(folder: Path) -> Path:
    """Return the folder of the programs of NVIDIA's driver that are replaced: nvidia-smi."""
    return folder / "bin"


def library_for(torch: TorchBuild) -> Path:
    """Return the folder of the library for a build of torch and the empty ones; made if it is not in the cache.

    Raises:
        InvalidInputError: this machine is not Linux, there is no compiler, or there are no headers of CUDA.

    """
    if sys.platform != "linux":
        raise InvalidInputError(
            f"a simulated card needs Linux, and this machine's system is {sys.platform}; run in a Linux container"
        )
    others = torch.other_libraries()
    folder = cache_folder() / "simulated_card" / _key(torch, others)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            _build(torch, others, Path(work))
            try:
                (Path(work) / "made").rename(folder)
            except OSError:  # another process has made it meanwhile
                assert folder.exists()
    return folder


def _key(torch: TorchBuild, others: Sequence[Path]) -> str:
    """Return a digest of all that the library is made of."""
    found = hashlib.sha256(f"{torch.folder} {torch.version} {torch.cuda}".encode())
    for file in (*sorted(SOURCES.iterdir()), *sorted(PROGRAMS.iterdir()), *MADE_BY):
        found.update(file.read_bytes())
    for file in others:
        found.update(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    return found.hexdigest()[:20]


def _build(torch: TorchBuild, others: Sequence[Path], work: Path) -> None:
    """Compile the library and the empty ones into the folder `made` of `work`."""
    made, headers, compiler = work / "made", torch.headers(), _compiler()
    made.mkdir()
    every = _linked(torch, others)
    names = sorted({name for library in every for name in _nvidias(library)} | set(OPENED_BY_NAME))
    compiled = (
        *(compiler, "-O1", "-fPIC", "-w", *(f"-isystem{folder}" for folder in headers), f"-I{SOURCES}"),
        f"-DSIMULATED_CUDA_VERSION={torch.cuda_number}",
        f"-DCUDNN_VERSION={torch.cudnn_number()}",
        f"-DBUILT_CAPABILITIES={torch.capabilities()}",
        f"-DMAX_CARDS={MAX_CARDS}",
        f"-DNVIDIA_LIBRARIES={json.dumps(NVIDIAS)[1:-1]}",
    )
    interface = work / "interface.c"
    interface.write_text(INTERFACE)
    functions = of_headers(_run(*compiled, "-E", "-P", interface))
    others_asked = (_asked(every) | torch.opened_functions()) - functions.keys()
    (work / "of_headers.c").write_text("".join([INTERFACE, HEADING, *functions.values()]))
    (work / "by_name.c").write_text("".join([HEADING, *map(by_name, sorted(others_asked))]))
    sources = (*sorted(SOURCES.glob("*.c")), work / "of_headers.c", work / "by_name.c")
    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(lambda source: _object(compiled, source, work), sources))
        _run(compiler, "-shared", f"-Wl,-soname,{FILE_NAME}", *objects, "-ldl", "-lpthread", "-o", made / FILE_NAME)
        list(pool.map(lambda name: _empty(compiler, name, every, work), names))
    programs(made).mkdir()
    for source in PROGRAMS.glob("*.c"):
        _run(*compiled, source, made / FILE_NAME, "-Wl,-rpath,$ORIGIN/..", "-o", programs(made) / source.stem)
    (made / "libcuda.so").symlink_to("libcuda.so.1")  # by this name the Triton of torch 2.8 links to it


def _linked(torch: TorchBuild, others: Iterable[Path]) -> list[SharedLibrary]:
    """Return torch's libraries, and the others that are linked to the same versions of NVIDIA's."""
    own = [read_library(file) for file in torch.libraries()]
    of_stem = {_stem(name): name for library in own for name in _nvidias(library)}

    def is_compatible(library: SharedLibrary) -> bool:
        names = _nvidias(library)
        return bool(names) and all(of_stem.get(_stem(name), name) == name for name in names)

    return [*own, *filter(is_compatible, map(read_library, others))]


def _nvidias(library: SharedLibrary) -> list[str]:
    """Return the names of NVIDIA's libraries that a library is linked to."""
    return [name for name in library.needed if name.startswith(NVIDIAS)]


def _stem(name: str) -> str:
    return name.partition(".so")[0]


def _compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise InvalidInputError(
            "a simulated card needs a C compiler, and there is neither cc nor gcc nor clang; install one: "
            "apt-get install gcc libc6-dev"
        )
    return found


def _asked(libraries: Iterable[SharedLibrary]) -> set[str]:
    """Return the functions that libraries ask NVIDIA's for."""
    asked = {name for library in libraries for name in library.asked if PREFIX.match(name)}
    return asked - {name for library in libraries for name in library.defined}


def _object(compiled: Sequence[str], source: Path, work: Path) -> Path:
    made = work / f"{source.stem}.o"
    _run(*compiled, "-c", source, "-o", made)
    return made


def _empty(compiler: str, name: str, libraries: Iterable[SharedLibrary], work: Path) -> None:
    """Make a library without symbols that has the name and the versions of one of NVIDIA's."""
    versions = sorted({version for it in libraries for library, version in it.versions if library == name})
    script = work / f"{name}.versions"
    script.write_text("".join(f"{version} {{ }};\n" for version in versions))
    options = (f"-Wl,-soname,{name}", *([f"-Wl,--version-script={script}"] if versions else []))
    _run(compiler, "-shared", "-nostdlib", *options, "-o", work / "made" / name, "-x", "c", "/dev/null")


def _run(*words: str | Path) -> str:
    """Return what a command printed.

    Raises:
        InvalidInputError: it failed.

    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise InvalidInputError(
            f"the simulated card's sources must compile, and {words[0]} failed: {done.stderr.strip()[:2000]}; "
            "install gcc and libc6-dev, or report this"
        )
    return done.stdout
