"""A Ray cluster of several raylets on this machine, as `ray start` makes one of several machines."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from processes import command_line, free_port, processes_with, wait_for, wait_for_the_end
from servers import launched

OBJECT_STORE_BYTES = 80 * 2**20
"""Close to the smallest that Ray accepts."""
OWN = {"RAY_memory_monitor_refresh_ms": "0", "PYTHONUNBUFFERED": "1"}
"""Ray ends no task where others use up the memory of this machine, and its output is written at once."""
STARTED = "will now block forever"
"""What `ray start` prints once a raylet has joined."""


@dataclass
class RayCluster:
    """Raylets with one core each; the first is the head of the cluster."""

    folder: Path
    port: int = field(default_factory=free_port)
    nodes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    token: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to join the cluster: a token that nothing else has."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    @property
    def address(self) -> str:
        """The address of the head."""
        return f"127.0.0.1:{self.port}"

    def add_node(self) -> None:
        """Start another raylet, and wait until the cluster has it."""
        head = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        words = [
            *("start", "--block", "--disable-usage-stats", "--num-cpus=1", "--node-ip-address=127.0.0.1"),
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            *([f"--address={self.address}"] if self.nodes else head),
        ]
        output = self.folder / "output.txt"
        before = output.read_text().count(STARTED) if output.exists() else 0
        with output.open("ab") as log:
            node = launched(
                ["setpriv", "--pdeathsig", "TERM", str(Path(sys.executable).parent / "ray"), *words],
                env={**os.environ, **OWN, **self.environment},
                stdout=log,
                stderr=log,
            )
        self.nodes.append(node)
        wait_for(lambda: output.read_text().count(STARTED) > before, "a raylet")

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes of the cluster."""
        found = []
        for node in self.nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(node.pid).children(recursive=True)
        return found

    @property
    def raylets(self) -> list[psutil.Process]:
        """The raylets that run, the head's first."""
        return [one for one in self.processes if _name(one) == "raylet"]

    @property
    def tasks(self) -> list[psutil.Process]:
        """The processes that run a task at this moment."""
        return [one for one in self.processes if "_task" in _name(one)]

    @property
    def tasks_and_their_processes(self) -> list[psutil.Process]:
        """The processes that run a task, and those that tasks have started, whether or not their raylet is alive."""
        of_python = [
            one for one in processes_with("RAY_AUTH_TOKEN", self.token) if "multiprocessing" in command_line(one)
        ]
        return [*self.tasks, *of_python]

    def stop(self) -> None:
        """End all processes, and wait for it."""
        family = self.processes
        for node in reversed(self.nodes):
            node.send_signal(signal.SIGTERM)
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(timeout=20)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        wait_for_the_end(family)


def _name(process: psutil.Process) -> str:
    """Return the first word of a process's command line without its folder, or what Ray calls the process."""
    try:
        return Path((process.cmdline() or [""])[0]).name if process.is_running() else ""
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


@contextlib.contextmanager
def running_ray(num_nodes: int) -> Iterator[RayCluster]:
    """Give a cluster of so many raylets."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder))
        try:
            for _ in range(num_nodes):
                cluster.add_node()
            yield cluster
        finally:
            cluster.stop()
