"""A CUDA build of torch in some environment: its versions, its libraries, and what else is linked to NVIDIA's there."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path

from pipeline.base.errors import InvalidInputError

HEADERS = (
    "triton/backends/nvidia/include",
    "nvidia/cu{major}/include",
    "nvidia/cuda_runtime/include",
    "nvidia/cuda_nvcc/include",
)
"""Folders of installed packages that hold CUDA's headers: Triton's, and those of NVIDIA's runtime."""
PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-crt")
PACKAGES_12 = ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12")
"""The packages with those headers, and with those of CUDA 12."""
APART = "crt/host_defines.h"
"""A header that NVIDIA's runtime includes, and that another of its packages has since CUDA 13."""
TOOLKIT = "/usr/local/cuda"
"""Where CUDA's toolkit is, if CUDA_HOME does not say it."""
FALLBACK_CUDNN = (9, 10, 0)
"""Version of cuDNN where torch's package does not say which it requires."""
OF_TORCH = re.compile(r"^(Requires-Dist: )?torch(?![\w-])", re.MULTILINE)
"""How the line of a requirement begins in a package's metadata, which takes longer to read as a message."""
FIND = """
import importlib.util, json, sys
found = importlib.util.find_spec("torch")
print(json.dumps([found and found.origin, [folder for folder in sys.path if folder]]))
"""


@dataclass(frozen=True)
class TorchBuild:
    """A CUDA build of torch."""

    folder: Path
    """Of the package `torch`."""
    version: str
    cuda: str
    """Version of CUDA that it was built with."""
    search_path: tuple[str, ...] = ()
    """Folders in which its interpreter looks for packages."""

    @property
    def cuda_number(self) -> int:
        """The number by which CUDA calls that version."""
        major, minor = map(int, self.cuda.split(".")[:2])
        return 1000 * major + 10 * minor

    def libraries(self) -> list[Path]:
        """Return torch's shared libraries."""
        return sorted((self.folder / "lib").glob("*.so"))

    def other_libraries(self) -> list[Path]:
        """Return the shared libraries of installed packages that require torch."""
        return sorted({file for package in self._packages() for file in _libraries_of(package)})

    def headers(self) -> list[Path]:
        """Return the folders with headers of CUDA, those of this version first.

        What these include and do not have is taken from another version: it declares no function.

        Raises:
            InvalidInputError: there are none.

        """
        major = self.cuda.partition(".")[0]
        parents = dict.fromkeys([self.folder.parent, *map(Path, self.search_path)])
        places = [parent / place.format(major=major) for parent in parents for place in HEADERS]
        places += [Path(os.environ.get("CUDA_HOME", TOOLKIT)) / "include"]
        complete = [place for place in places if (place / APART).exists()]
        own = next((place for place in places if _runtime_major(place) == major), None)
        if own is not None and complete:
            return [own, *(place for place in complete if place != own)]
        packages = PACKAGES_12 if major == "12" else PACKAGES
        named = " ".join(f'"{name}=={self.cuda}.*"' for name in packages)
        raise InvalidInputError(
            f"a simulated card needs the headers of CUDA {major}, and neither Triton nor NVIDIA's runtime has them all "
            f"beside {self.folder}; run: pip install {named}"
        )

    def capabilities(self) -> str:
        """Return the compute capabilities that it has kernels for, as numbers: 75 is 7.5."""
        for name in ("libtorch_python.so", "libtorch_cuda.so"):
            if found := re.search(rb"sm_\d+a?( sm_\d+a?)+", (self.folder / "lib" / name).read_bytes()):
                return ",".join(sorted(set(re.findall(r"\d+", found[0].decode())), key=int))
        return "75,80,86,90"

    def cudnn_number(self) -> int:
        """Return the number by which cuDNN calls the version that it requires."""
        own = next(iter(distributions(name="torch", path=[str(self.folder.parent)])), None)
        requirements = "\n".join(own.requires or []) if own else ""
        found = re.search(r"nvidia-cudnn[\w-]*==(\d+)\.(\d+)\.(\d+)", requirements)
        major, minor, patch = map(int, found.groups()) if found else FALLBACK_CUDNN
        return 10_000 * major + 100 * minor + patch

    def opened_functions(self) -> set[str]:
        """Return the functions of the driver and of NVML that it looks up by name."""
        text = (self.folder / "lib" / "libc10_cuda.so").read_bytes()
        return {name.decode() for name in re.findall(rb"(?<=\0)(?:cu[A-Z]|nvml[A-Z])\w+(?=\0)", text)}

    def _packages(self) -> Iterator[Distribution]:
        """Yield the packages that its interpreter finds and that require torch."""
        for package in distributions(path=[*self.search_path]):
            header, _, _ = (package.read_text("METADATA") or "").partition("\n\n")  # a description follows
            if OF_TORCH.search(header or package.read_text("requires.txt") or ""):
                yield package


def _libraries_of(package: Distribution) -> Iterator[Path]:
    for file in package.files or []:
        if ".so" in file.suffixes:
            yield Path(str(package.locate_file(file)))


def _runtime_major(headers: Path) -> str | None:
    """Return the major version of CUDA that headers are of; None if they are not there."""
    try:
        text = (headers / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return str(int(found[1]) // 1000) if found and (headers / "cuda.h").exists() else None


class CpuBuildError(InvalidInputError):
    """The environment has a build of torch for CPUs."""


@cache
def find_torch(python: Path) -> TorchBuild:
    """Return the build of torch that an interpreter imports.

    Raises:
        InvalidInputError: it has none, or one that was not built for CUDA.

    """
    done = subprocess.run([str(python.absolute()), "-c", FIND], capture_output=True, text=True, cwd="/")
    origin, search_path = (None, []) if done.returncode else json.loads(done.stdout.splitlines()[-1])
    if origin is None:
        raise InvalidInputError(
            f"a simulated card runs PyTorch's CUDA build, and {python} has no torch; install it, or name another Python"
        )
    folder = Path(origin).parent
    found = dict(re.findall(r"^(__version__|cuda)\b.*?= '?([^'\n]*)'?$", (folder / "version.py").read_text(), re.M))
    if found.get("cuda", "None") == "None":
        raise CpuBuildError(
            f"a simulated card runs PyTorch's CUDA build, and torch {found.get('__version__')} in {folder.parent} is "
            "none"
        )
    return TorchBuild(folder=folder, version=found["__version__"], cuda=found["cuda"], search_path=tuple(search_path))
