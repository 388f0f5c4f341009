"""The engine of simulated cards, as far as it needs no CUDA build of torch: rules, start-up hook, generated sources."""

import os
import subprocess
import sys
import sysconfig
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.base.errors import InvalidInputError
from pipeline.simulation import environment as module
from pipeline.simulation import install as installer
from pipeline.simulation import library, run
from pipeline.simulation.cards import CARDS, cards_with, find_card
from pipeline.simulation.elf import read_library
from pipeline.simulation.environment import HOOK, card_variables, environment, is_script, python_of
from pipeline.simulation.functions import by_name, of_headers
from pipeline.simulation.library import FILE_NAME, library_for
from pipeline.simulation.torch_build import TorchBuild

needs_build_for_cpus = pytest.mark.skipif(
    "SIMULATED_CARD_NAME" in os.environ, reason="this environment has a CUDA build"
)
HEADER = """
CUresult cuInit(unsigned int Flags);
extern cudaError_t cudaThing(struct thing *made, const int *given,
    void *data, char *text, size_t *bytes);
typedef void (*cudaCallback_t)(int a);
"""


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder of a library that is not compiled."""
    folder = tmp_path / "compiled"
    folder.mkdir()
    for name in (FILE_NAME, "libcuda.so.1"):
        (folder / name).touch()
    monkeypatch.setattr(module, "_library", lambda python: folder)
    return folder


def test_variables_come_in_front_of_the_users_own(compiled: Path) -> None:
    base = {"LD_PRELOAD": "/mine.so", "PYTHONPATH": "/my/code", "CUDA_VISIBLE_DEVICES": "GPU-5"}
    added = environment(find_card("t4"), python=Path(sys.executable), num_cards=2, base=base)
    assert added["LD_PRELOAD"] == f"{compiled}/{FILE_NAME}:{compiled}/libcuda.so.1:/mine.so"
    assert added["PYTHONPATH"] == f"{HOOK}:/my/code"
    assert added["CUDA_VISIBLE_DEVICES"] == "0,1" and added["SIMULATED_CARD_OTHERS_MIB"] == "0"
    assert environment(find_card("t4"), python=Path(sys.executable), num_cards=2, base={**base, **added}) == added


def test_the_users_folders_may_have_spaces_and_the_reports_may_be_relative(compiled: Path) -> None:
    base = {"PYTHONPATH": "/my own/code:/more"}
    added = environment(find_card("t4"), python=Path(sys.executable), report=Path("records"), base=base)
    assert added["PYTHONPATH"] == f"{HOOK}:/my own/code:/more"
    assert added["SIMULATED_CARD_REPORT"] == str(Path.cwd() / "records")


def test_a_budget_is_what_others_leave(compiled: Path) -> None:
    card = find_card("a100")
    added = environment(card, python=Path(sys.executable), budget_bytes=2**30)
    assert int(added["SIMULATED_CARD_OTHERS_MIB"]) == card.memory_mib - card.context.mib - 1024
    with pytest.raises(InvalidInputError, match="at most 80640 MiB, not 81920"):
        environment(card, python=Path(sys.executable), budget_bytes=80 * 2**30)


def test_a_machine_has_1_to_16_cards(compiled: Path) -> None:
    with pytest.raises(InvalidInputError, match="1 to 16 cards, not 17"):
        environment(find_card("t4"), python=Path(sys.executable), num_cards=17)


def test_a_path_that_cannot_be_preloaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_library", lambda python: _folder(tmp_path / "my cache"))
    with pytest.raises(InvalidInputError, match="no space.*my cache.*FITPROOF_CACHE"):
        environment(find_card("t4"), python=Path(sys.executable))


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_the_interpreter_of_a_command_is_python_or_that_of_its_first_line(tmp_path: Path) -> None:
    assert python_of([sys.executable, "train.py"]) == Path(sys.executable)
    of_env = "#!/usr/bin/env -S python3 -u\n"
    long_path = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n"
    relocatable = "#!/bin/sh\n'''exec' \"$(dirname -- \"$(realpath -- \"$0\")\")\"/'python' \"$0\" \"$@\"\n' '''\n"
    for number, text in enumerate((f"#!{sys.executable}\n", of_env, long_path, relocatable)):
        script = tmp_path / f"torchrun{number}"
        script.write_text(text)
        script.chmod(0o755)
        assert "python" in python_of([str(script)]).name and is_script(script)
        if text != of_env and text != relocatable:  # which name what is on the path
            assert python_of([str(script)]) == Path(sys.executable)
    with pytest.raises(InvalidInputError, match="must be on this machine, and 'no-such-command' is not"):
        python_of(["no-such-command"])
    wrapper = tmp_path / "python3"  # as pyenv's shims are
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    assert python_of([str(wrapper), "train.py"]) == Path(sys.executable)
    assert "python" in python_of(["ls"]).name  # whatever it starts finds that on the path


@needs_build_for_cpus
def test_a_command_runs_on_the_cuda_build_if_it_is_python_or_a_script_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "install", lambda: Path("/cuda/bin/python"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.chdir(Path(sys.executable).parents[1])
    long_path = f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\n"
    for name, text in {
        "python3": f'#!/bin/sh\nexec {sys.executable} "$@"\n',  # as pyenv's shims are
        "torchrun": f"#!{sys.executable}\n",
        "accelerate": long_path,
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for python in (sys.executable, f"bin/{Path(sys.executable).name}", "python", str(tmp_path / "python3")):
        assert run.on_cuda_build([python, "train.py"], may_install=True) == ("/cuda/bin/python", "train.py")
    for script in (str(tmp_path / "torchrun"), str(tmp_path / "accelerate")):
        assert run.on_cuda_build([script, "train.py"], may_install=True) == ("/cuda/bin/python", script, "train.py")
    for others in (["bash", "train.sh"], ["env", "A=1", "python", "train.py"]):
        with pytest.raises(InvalidInputError, match=f"'{others[0]}' starts Python on its own; write what it starts"):
            run.on_cuda_build(others, may_install=True)


@needs_build_for_cpus
def test_a_build_for_cpus_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of its own is installed beside this one; another one is its owner's to change."""
    monkeypatch.setattr(run, "installed", lambda: False)
    with pytest.raises(InvalidInputError, match=r"torch .* is none; add --install true"):
        run.on_cuda_build([sys.executable, "train.py"], may_install=False)
    venv.create(tmp_path / "other", symlinks=True)
    [packages] = (tmp_path / "other").glob("lib/*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    with pytest.raises(InvalidInputError, match=r"torch .* is none; install one there"):
        run.on_cuda_build([str(tmp_path / "other" / "bin" / "python"), "train.py"], may_install=True)


@needs_build_for_cpus
def test_an_environment_is_found_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "install", lambda: Path("/cuda/bin/python"))
    (tmp_path / "linked").symlink_to(Path(sys.executable).parents[1])
    linked = tmp_path / "linked" / "bin" / Path(sys.executable).name
    assert run.on_cuda_build([str(linked), "train.py"], may_install=True) == ("/cuda/bin/python", "train.py")


def test_what_the_machine_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    torch = TorchBuild(folder=tmp_path / "torch", version="2.13.0", cuda="13.0")
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(InvalidInputError, match='headers of CUDA 13.*pip install "nvidia-cuda-runtime==13.0'):
        library_for(torch)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    (tmp_path / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
    with pytest.raises(InvalidInputError, match='"nvidia-cuda-crt==13.0'):
        library_for(torch)
    other = tmp_path / "triton" / "backends" / "nvidia" / "include" / "crt"  # of another version than torch's
    other.mkdir(parents=True)
    (other / "host_defines.h").touch()
    assert torch.headers() == [tmp_path / "include", other.parent]
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    with pytest.raises(InvalidInputError, match="needs a C compiler"):
        library_for(torch)
    monkeypatch.setattr(library.sys, "platform", "darwin")
    with pytest.raises(InvalidInputError, match="needs Linux, and this machine's system is darwin"):
        library_for(torch)


def write_torch(python: Path) -> None:
    """Write what pip leaves of torch in the environment of an interpreter."""
    folder = next(python.parents[1].glob("lib/python*/site-packages")) / "torch-1.dist-info"
    folder.mkdir(exist_ok=True)
    own = installer.version("torch").partition("+")[0]
    (folder / "METADATA").write_text(
        f"Name: torch\nVersion: {own}\nRequires-Dist: triton==3.7.1; platform_system == 'Linux'\n"
    )


def test_commands_that_install_at_once_make_one_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    asked = list[str]()

    def pip(python: Path, *requirements: str) -> None:
        asked.append(requirements[0])
        time.sleep(0.2)
        write_torch(python)

    monkeypatch.setattr(installer, "_pip", pip)
    with ThreadPoolExecutor(2) as commands:
        first, second = commands.map(lambda _: installer.install(), range(2))
    assert first == second and [name.partition("=")[0] for name in asked] == ["torch", "triton"]


def test_an_environment_counts_as_installed_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    asked = list[str]()

    def pip(python: Path, *requirements: str) -> None:
        asked.append(requirements[0])
        if len(asked) in (1, 3):
            raise InvalidInputError("there is no network")
        write_torch(python)

    monkeypatch.setattr(installer, "_pip", pip)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="no network"):
            installer.install()
        assert not installer.installed()
    installer.install()
    assert installer.installed()
    assert [name.partition("=")[0] for name in asked] == ["torch"] * 2 + ["triton"] * 2


def test_outputs_of_a_declared_function_are_those_whose_size_is_known() -> None:
    first, second = of_headers(HEADER).items()
    assert first[0] == "cuInit" and "memset" not in first[1]
    assert second[0] == "cudaThing" and second[1].count("memset") == 2
    assert "memset(made, 0, sizeof *made)" in second[1] and "memset(bytes, 0, sizeof *bytes)" in second[1]


def test_a_function_without_header_answers_by_its_name() -> None:
    names = ["cublasSgemm_v2", "cublasSetStream_v2", "cudnnCreateThing", "cusparseGetThing"]
    gemm, stream, create, get = map(by_name, names)
    assert "card_launched" in gemm and "card" not in stream.replace("WEAK", "")
    assert "card_new" in create and "return 1" in get and 'card_unmodelled("cusparseGetThing")' in get


def test_the_users_own_start_up_module_runs_and_hooks_follow_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.users_own = __file__\n")
    (tmp_path / "torch.py").write_text("import sys\nsys.order = ['torch']\n")
    (tmp_path / "hook.py").write_text("import sys\nsys.order.append('hook')\n")
    code = """
import sys
import sysconfig
before = hasattr(sys, "order")
import torch, sitecustomize
print(sys.users_own, sitecustomize.__file__, before, sys.order, sys.path)
"""
    variables = {
        "PYTHONPATH": f"{HOOK}:{tmp_path}",
        "SIMULATED_CARD_NAME": "any",
        "SIMULATED_CARD_HOOKS": str(tmp_path / "hook.py"),
    }
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, cwd=tmp_path)
    own = tmp_path / "sitecustomize.py"
    assert done.stdout.startswith(f"{own} {own} False ['torch', 'hook'] "), done.stderr
    assert str(HOOK) not in done.stdout


def test_torchs_compiler_is_imported_once_something_asks_for_it_and_then_all_is_as_torch_made_it() -> None:
    code = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(4))
for name in ("Adagrad", "AdamW", "RMSprop", "SGD"):
    optimizer = getattr(torch.optim, name)([weight])
    weight.square().sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.is_grad_enabled() and weight.grad_fn is None

def seen():
    own = [torch._disable_dynamo.__name__, "_dynamo" in decorated.__code__.co_names, *vars(zeroes)]
    return ["torch._dynamo" in sys.modules, *own]

decorated, zeroes = torch.optim.SGD.__dict__["step"].__wrapped__, torch.optim.Optimizer.zero_grad.__wrapped__
print(seen())
import torch._dynamo
print(seen())
"""
    variables = {"PYTHONPATH": str(HOOK), "SIMULATED_CARD_HOOKS": str(HOOK / "compiler.py")}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[False, '_disable_later', False, '__dynamo_disable']",
        "[True, '_disable_dynamo', True]",
    ]


def test_symbols_of_a_shared_library_are_read(tmp_path: Path) -> None:
    source = tmp_path / "one.c"
    source.write_text(
        "extern int asked(void); __attribute__((weak)) extern int may(void);"
        "int defined(void) { return may ? asked() : 0; }"
    )
    file = tmp_path / "libone.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(file)], check=True)
    found = read_library(file)
    assert "asked" in found.asked and "may" not in found.asked and "defined" in found.defined
    assert read_library(source).needed == frozenset()


def test_the_current_folder_stays_on_pythons_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's path has it where PYTHONPATH has an empty part."""
    monkeypatch.setattr(module, "_library", lambda python: Path("/lib/card.so"))
    monkeypatch.setattr(module, "preloaded", lambda library: [library])
    of = {given: environment(CARDS["t4"], python=Path("p"), base={"PYTHONPATH": given}) for given in (":/own", "")}
    assert [one["PYTHONPATH"] for one in of.values()] == [f"{HOOK}::/own", str(HOOK)]


def test_a_card_without_room_for_a_context_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="must have more memory than its CUDA context"):
        card_variables(find_card("memory=400MiB,capability=7.5"))


def test_cards_that_have_so_much_have_it_beside_their_own_context() -> None:
    least = CARDS["rtx2080ti"].memory_mib - CARDS["rtx2080ti"].context.mib
    capability = CARDS["rtx2080ti"].capability
    assert "rtx2080ti" in cards_with(capability, least * 2**20)
    assert "rtx2080ti" not in cards_with(capability, (least + 1) * 2**20)


def test_every_card_says_where_its_context_is_from() -> None:
    assert all(card.context.mib > 0 and card.context.source for card in CARDS.values())
