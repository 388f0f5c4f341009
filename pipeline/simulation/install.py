"""Makes an environment with torch's CUDA build, where the user's own has a build for CPUs.

    python -m pipeline.simulation.install FOLDER            the version of torch that runs this module
    python -m pipeline.simulation.install FOLDER 2.15.0     another

It installs torch without NVIDIA's libraries, whose place the simulated card takes, and Triton, which compiles for
torch.compile and has the headers of CUDA. All other packages are those of the environment that runs this.
"""

import fcntl
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, distributions, version
from pathlib import Path

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import cache_folder

OTHER_PACKAGES = "other_packages.pth"
"""The file that is written last: an environment without it is not complete."""


def installed() -> bool:
    """Whether the environment that install() makes by default is complete."""
    return (_packages(_default_folder(_own_version())) / OTHER_PACKAGES).exists()


def install(folder: Path | None = None, torch_version: str | None = None) -> Path:
    """Make or update the environment in a folder, by default one of the cache, and return its interpreter.

    Raises:
        InvalidInputError: a package cannot be installed, or the index has no CUDA build of this version of torch.

    """
    wanted = torch_version or _own_version()
    with (cache_folder() / "install.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one process at a time: another's half of an environment would be removed
        return _install(folder or _default_folder(wanted), wanted)


def _install(folder: Path, wanted: str) -> Path:
    python = folder / "bin" / "python"
    packages = _packages(folder)
    torch = _installed_torch(packages)
    if torch is None or torch.version.partition("+")[0] != wanted:
        venv.create(folder, clear=True, symlinks=True)
        # A triple "=": an index may offer a build for CPUs too, whose version is the same but for "+cpu".
        _pip(python, f"torch==={wanted}")
        torch = _installed_torch(packages)
        assert torch is not None
    if not (packages / OTHER_PACKAGES).exists():
        _pip(python, _triton_of(torch))
    others = sysconfig.get_path("purelib")
    (packages / OTHER_PACKAGES).write_text(f"import site; site.addsitedir({others!r})\n")
    return python


def _own_version() -> str:
    return version("torch").partition("+")[0]


def _packages(folder: Path) -> Path:
    """Return the folder of an environment's packages."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def _default_folder(torch_version: str) -> Path:
    return cache_folder() / "simulated_card" / f"torch-{torch_version}"


def _pip(python: Path, *requirements: str) -> None:
    options = ("--quiet", "--disable-pip-version-check", "--no-deps")
    command = (sys.executable, "-m", "pip", "--python", str(python), "install", *requirements, *options)
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise InvalidInputError(f"pip must install {' '.join(requirements)}, and it failed: {done.stderr.strip()}")


def _installed_torch(packages: Path) -> Distribution | None:
    return next(iter(distributions(name="torch", path=[str(packages)])), None)


def _triton_of(torch: Distribution) -> str:
    """Return what torch's CUDA builds require of Triton, whose package also has the headers of CUDA."""
    for requirement in torch.requires or []:
        if found := re.match(r"triton ?\(?(==[\w.]+)", requirement):
            return f"triton{found[1]}"
    raise InvalidInputError(
        f"a simulated card runs PyTorch's CUDA build, and the index offers torch {torch.version} without; name another "
        "version"
    )


if __name__ == "__main__":
    install(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
