"""Makes the environment in which torch's CUDA build runs on simulated cards.

    python tests/cuda_without_gpu/install.py .venv-cuda            the version of torch that runs this script
    python tests/cuda_without_gpu/install.py .venv-cuda 2.15.0     another

Beside torch it installs none of the libraries that torch's CUDA build asks for: the stand-in takes their names. All
other packages are those of the environment that runs this script. It needs gcc and binutils.
"""

import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Iterator, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions, version
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = "libsimulated_card.so"
OPENED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")
"""The driver's libraries, which torch and pynvml open when they need them."""
OF_THE_SYSTEM = re.compile(r"ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp)\.so")
"""Libraries that torch and bitsandbytes need and that are not NVIDIA's."""
ZERO = """
#include <stdio.h>
#include <stdlib.h>
static void say_once(const char *name) {
    if (getenv("SIMULATED_CARD_VERBOSE")) fprintf(stderr, "simulated card: %s does nothing\\n", name);
}
#define ZERO(NAME) \\
    long NAME(void) { static int calls; if (!calls++) say_once(#NAME); return 0; }
"""
"""What answers 0, and names itself at the first call if asked to."""


@dataclass(frozen=True)
class Symbol:
    """A symbol of a shared library; without a version it has an empty one."""

    name: str
    version: str
    is_defined: bool


def main() -> None:
    """Make or update the environment in the folder that the command line names."""
    folder = Path(sys.argv[1])
    wanted = sys.argv[2] if len(sys.argv) > 2 else version("torch").partition("+")[0]
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    torch = _installed_torch(packages)
    if torch is None or torch.version != wanted:
        venv.create(folder, clear=True, symlinks=True)
        # A triple "=": an index may offer a build for CPUs too, whose version is the same but for "+cpu".
        _pip("--python", str(folder / "bin" / "python"), "install", f"torch==={wanted}")
        torch = _installed_torch(packages)
    assert torch is not None
    runtime = _required(torch, "cuda-toolkit")
    headers = folder / f"headers-{runtime}"
    if not headers.exists():
        major, minor, _ = runtime.split(".")
        wheels = [f"nvidia-cuda-{name}~={major}.{minor}.0" for name in ("runtime", "crt")]
        _pip("install", "--target", str(headers), *wheels)
    major = runtime.partition(".")[0]
    cuda, others = f"nvidia/cu{major}", sysconfig.get_path("purelib")
    libraries, target, work = packages / "torch" / "lib", packages / cuda / "lib", folder / "build"
    bitsandbytes = sorted(Path(others).glob(f"bitsandbytes/libbitsandbytes_cuda{major}*.so"))
    _build(libraries, bitsandbytes, headers / cuda / "include", target, work, _cudnn_version(torch))
    (packages / "other_packages.pth").write_text(f"import site; site.addsitedir({others!r})\n")


def _pip(*words: str) -> None:
    options = ("--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.run([sys.executable, "-m", "pip", *words, *options], check=True)


def _installed_torch(packages: Path) -> Distribution | None:
    return next(iter(distributions(name="torch", path=[str(packages)])), None)


def _required(torch: Distribution, name: str) -> str:
    """Return the version that torch requires of a package whose name begins so."""
    for requirement in torch.requires or []:
        if found := re.match(rf"{name}[^=]*==([\d.]+)", requirement):
            return found[1]
    raise SystemExit(f"torch {torch.version} is not a CUDA build that this script knows: it does not require {name}")


def _cudnn_version(torch: Distribution) -> int:
    """Return the number by which cuDNN calls its version."""
    major, minor, patch = map(int, _required(torch, "nvidia-cudnn").split(".")[:3])
    return 10_000 * major + 100 * minor + patch


def _build(
    torch_libraries: Path, others: Sequence[Path], headers: Path, target: Path, work: Path, cudnn_version: int
) -> None:
    """Compile the stand-in into the folder in which torch looks for NVIDIA's libraries, under all their names.

    It answers whatever torch's libraries and those of `others` ask for.
    """
    for folder in (target, work):
        folder.mkdir(parents=True, exist_ok=True)
    libraries = [*sorted(torch_libraries.glob("*.so")), *others]
    names = _needed_names(libraries)
    versions = _wanted(libraries, names)
    wanted = {name for of_one in versions.values() for name in of_one} | _driver_functions(torch_libraries)
    definitions = [f"-DCUDNN_VERSION={cudnn_version}", f"-DBUILT_CAPABILITIES={_capabilities(torch_libraries)}"]
    compiler = ("gcc", "-O1", "-fPIC", "-shared", *definitions, f"-isystem{headers}")
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
    sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    without_zeros, zeros, script = work / "without_zeros.so", work / "zeros.c", work / "versions.txt"
    _run(*compiler, *warnings, *sources, "-o", str(without_zeros))
    ours = {symbol.name for symbol in _symbols(without_zeros) if symbol.is_defined}
    zeros.write_text(ZERO + "".join(f"ZERO({name})\n" for name in sorted(wanted - ours)))
    script.write_text("".join(f"{v} {{ {'; '.join(sorted(versions[v]))}; }};\n" for v in sorted(versions) if v))
    linker = (f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={script}")
    # The compiler has a declaration of its own for some of the names that answer 0, hence -w.
    _run(*compiler, "-w", *sources, str(zeros), *linker, "-o", str(work / LIBRARY))
    (work / LIBRARY).replace(target / LIBRARY)
    for name in (*names, *OPENED_BY_NAME):
        if not (target / name).is_symlink():
            (target / name).symlink_to(LIBRARY)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def _capabilities(torch_libraries: Path) -> str:
    """Return the compute capabilities that torch was built for, as numbers: 75 is 7.5."""
    found = re.search(rb"sm_\d+( sm_\d+)+", (torch_libraries / "libtorch_python.so").read_bytes())
    assert found is not None
    return ",".join(re.findall(r"\d+", found[0].decode()))


def _symbols(library: Path) -> Iterator[Symbol]:
    """Yield the symbols that a library defines or asks for, without those that it can do without."""
    for line in _run("readelf", "--wide", "--dyn-syms", str(library)).splitlines():
        columns = line.split()
        if len(columns) < 8 or columns[4] == "LOCAL" or (columns[4] == "WEAK" and columns[6] == "UND"):
            continue
        name, _, of_version = columns[7].partition("@")
        yield Symbol(name=name, version=of_version.lstrip("@"), is_defined=columns[6] != "UND")


def _needed_names(libraries: Sequence[Path]) -> list[str]:
    """Return the names of NVIDIA's libraries that these are linked to."""
    listings = (_run("readelf", "--wide", "--dynamic", str(library)) for library in libraries)
    needed = {name for listing in listings for name in re.findall(r"\(NEEDED\).*\[(.*)\]", listing)}
    return sorted(name for name in needed - {library.name for library in libraries} if not OF_THE_SYSTEM.match(name))


def _wanted(libraries: Iterable[Path], names: Sequence[str]) -> dict[str, set[str]]:
    """Return the symbols that the libraries ask NVIDIA's for, by their version, which is empty for most."""
    symbols = {library: list(_symbols(library)) for library in libraries}
    defined = {symbol.name for of_one in symbols.values() for symbol in of_one if symbol.is_defined}
    elsewhere = CDLL(None), CDLL("libstdc++.so.6")  # Python, and the system with what it needs
    of_nvidia = {"", *(of_version for library in symbols for of_version in _versions(library, names))}
    wanted: dict[str, set[str]] = {}
    for symbol in (symbol for of_one in symbols.values() for symbol in of_one):
        found = symbol.name in defined or any(hasattr(library, symbol.name) for library in elsewhere)
        if not found and symbol.version in of_nvidia:
            wanted.setdefault(symbol.version, set()).add(symbol.name)
    return wanted


def _versions(library: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the versions of symbols that a library asks NVIDIA's libraries for."""
    file = ""
    for line in _run("readelf", "--wide", "--version-info", str(library)).splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        elif file in names and (found := re.search(r"Name: (\S+) +Flags", line)):
            yield found[1]


def _driver_functions(torch_libraries: Path) -> set[str]:
    """Return the functions of the driver and of NVML that torch looks up by name."""
    text = (torch_libraries / "libc10_cuda.so").read_bytes()
    return {name.decode() for name in re.findall(rb"(?<=\0)(?:cu[A-Z]|nvml[A-Z])\w+(?=\0)", text)}


if __name__ == "__main__":
    main()
