"""A training on two machines: torchrun starts `fitproof main` on each, in network namespaces that see each other."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from conftest import ROOT
from processes import free_port, processes_with, wait_for
from project import SMALL, Project, as_words

from pipeline.base import machines
from pipeline.base.errors import InvalidInputError
from pipeline.cli import main
from pipeline.runtime.run_folder import read_steps

TORCHRUN = Path(sys.executable).with_name("torchrun")
TRAINED = {**SMALL, "model": "qwen3-nano", "causal_lm.num_heads": "4", "effective_batch_size": "8"}
FOUR_RANKS = {"world_size": "4", "sharding": "fsdp", "micro_batch_size": "1"}
CABLE = "cable"
"""The network device of each machine."""
NUMBER = "FITPROOF_TEST_MACHINE"
"""Variable of the processes of a machine."""


@dataclass(frozen=True)
class Two:
    """Two machines with one disk."""

    folder: Path
    names: tuple[str, str]
    addresses: tuple[str, str]
    port: int

    def start(self, number: int, rendezvous: list[str], settings: dict[str, str]) -> "subprocess.Popen[str]":
        """Let torchrun start `fitproof main` on a machine."""
        own = {"GLOO_SOCKET_IFNAME": CABLE, NUMBER: f"{self.names[number]}", "PYTHONPATH": str(ROOT)}
        words = [*rendezvous, "--no-python", sys.executable, "-m", "fitproof", "main", *as_words(settings)]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], str(TORCHRUN), "--nnodes", "2", *words],
            cwd=self.folder,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def fixed(self, number: int) -> list[str]:
        """Return torchrun's words for machines with fixed numbers."""
        return [*("--node-rank", str(number)), *("--master-addr", self.addresses[0], "--master-port", str(self.port))]

    def agreed(self, number: int) -> list[str]:
        """Return torchrun's words for machines that agree on their numbers."""
        is_host = "true" if number == 0 else "false"
        where = ["--rdzv-endpoint", f"{self.addresses[0]}:{self.port}", "--rdzv-conf", f"is_host={is_host}"]
        return ["--rdzv-backend", "c10d", "--rdzv-id", "a", *where, "--local-addr", self.addresses[number]]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    """Give two network namespaces with a cable between them."""
    names = tuple(f"fitproof-{number}-{os.getpid()}" for number in (1, 2))
    if not shutil.which("ip") or _ip("netns", "add", names[0]).returncode:
        pytest.skip("needs network namespaces: ip, and the right to make them")
    try:
        assert _ip("netns", "add", names[1]).returncode == 0
        ends = [word for name in names for word in (CABLE, "netns", name)]
        assert _ip("link", "add", *ends[:3], "type", "veth", "peer", "name", *ends[3:]).returncode == 0
        addresses = ("10.77.0.1", "10.77.0.2")
        for name, address in zip(names, addresses, strict=True):
            assert _ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE).returncode == 0
            for device in (CABLE, "lo"):
                assert _ip("-n", name, "link", "set", device, "up").returncode == 0
        yield Two(tmp_path, (names[0], names[1]), addresses, free_port())
    finally:
        for name in names:
            for process in processes_with(NUMBER, name):
                process.kill()
            _ip("netns", "del", name)


def _ip(*words: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["ip", *words], capture_output=True)


def losses(folder: Path) -> list[float]:
    """Return the losses of the newest run."""
    [file] = sorted(folder.glob("runs/*-main-*"))[-1].glob("*/steps.jsonl")
    return [step["values"]["loss"] for step in read_steps(file)[0]]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fixed", pytest.param("agreed", marks=pytest.mark.long)])
def test_two_machines_train_as_one_and_their_save_goes_on_elsewhere(two: Two, how: str) -> None:
    shutil.copytree(ROOT / "experiments", two.folder / "experiments")
    alone = Project(two.folder)
    assert alone.here("main", TRAINED).returncode == 0
    expected = losses(two.folder)
    settings = {**TRAINED, **FOUR_RANKS, "save_every": "2"}
    started = [two.start(number, getattr(two, how)(number), settings) for number in (0, 1)]
    outputs = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert losses(two.folder) == pytest.approx(expected, rel=1e-5)
    [first] = [output for output in outputs if "results:" in output]
    [second] = [output for output in outputs if "machine 1 of 2: ok" in output]
    assert "MLflow run" in first and "MLflow run" not in second
    assert len(alone.runs()) == 4  # parent and child of each of the two trainings
    [save] = two.folder.glob("runs/*/*/saved/step_4")
    assert (
        alone.here("main", {"resume": str(save), "num_steps": "6", "world_size": "1", "sharding": "none"}).returncode
        == 0
    )
    assert len(losses(two.folder)) == 2


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_is_killed_on_one_machine_ends_both(two: Two) -> None:
    shutil.copytree(ROOT / "experiments", two.folder / "experiments")
    settings = {**TRAINED, "world_size": "2", "num_steps": "100000", "micro_batch_size": "1"}
    started = [two.start(number, two.fixed(number), settings) for number in (0, 1)]
    wait_for(lambda: len(list(two.folder.glob("runs/*/*/steps.jsonl"))) == 1, "the first step")
    of_second = processes_with(NUMBER, two.names[1])
    youngest = max(of_second, key=psutil.Process.create_time)
    youngest.send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=600)[0] for process in started]
    assert all(process.returncode for process in started)
    assert "rank 1: killed by SIGKILL" in outputs[1]
    assert "rank 0: " in outputs[0] and "results:" in outputs[0]
    assert losses(two.folder)


@pytest.mark.slow
def test_machines_with_other_settings_are_refused_on_both(two: Two) -> None:
    shutil.copytree(ROOT / "experiments", two.folder / "experiments")
    settings = {**TRAINED, "world_size": "2"}
    both = (settings, {**settings, "learning_rate": "0.1"})
    started = [two.start(number, two.fixed(number), own) for number, own in enumerate(both)]
    outputs = [process.communicate(timeout=600)[0] for process in started]
    for output in outputs:
        assert "on machine 0 learning_rate is 0.0005 and on machine 1 0.1; start the same on all" in output
        assert "exitcode  : 2" in output
    assert not list(two.folder.glob("runs/*"))


@pytest.mark.parametrize(
    ("variables", "words", "said"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}, ["main"], "set --nproc-per-node 1, and --world_size"),
        ({"GROUP_WORLD_SIZE": "2"}, ["search"], "run it on one machine, and its best.yaml on all"),
        (
            {"GROUP_WORLD_SIZE": "2"},
            ["main", "--device", "cpu", "--world_size", "3"],
            "set --world_size to a multiple of 2",
        ),
    ],
)
def test_what_torchrun_has_started_wrongly_is_refused(
    variables: dict[str, str],
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_machine_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(machines, "SECONDS_FOR_OTHERS", 0.1)
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError, match="machine 1 has not said its settings for 0.1 s"):
        machines.Machine(0, 2).ask_all("settings", "{}")


def test_a_machine_that_has_all_answers_waits_until_the_others_have_them() -> None:
    asks = "import sys; from pipeline.base import machines; machines.SECONDS_BETWEEN_LOOKS = float(sys.argv[2])\n"
    asks += "number = int(sys.argv[1]); print(machines.Machine(number, 2).ask_all('settings', str(number)))"
    found = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    quick, slow = (
        subprocess.Popen([sys.executable, "-c", asks, number, looks], env=found, stdout=subprocess.PIPE, text=True)
        for number, looks in (("0", "0.01"), ("1", "3"))
    )
    outputs = [process.communicate(timeout=120)[0] for process in (quick, slow)]
    assert outputs == ["['0', '1']\n"] * 2
