"""A plugin of pytest: `@pytest.mark.gpu_memory(gpu="a100", max_allocated="38GiB")` runs a test on a simulated card.

The test runs with its fixtures in a process of its own, which `fitproof check` starts on the card, whatever GPU this
machine has; the marker's arguments are settings of `fitproof check`. Nothing of Fitproof is imported here: pytest loads
this module for every project of the environment.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from typing import Any

import pytest

MARKER = "gpu_memory"
UPDATE = "--update-gpu-memory"
OPTIONS = "FITPROOF_OPTIONS_OF_PYTEST"
"""Variable with the options of the pytest that started this process for one test, which reports to that one."""
RECORD = "\x1e"
"""What stands before a report in the output of a test's process: ASCII's record separator."""
OUTPUT_OPTIONS = ("verbose", "showlocals", "tbstyle", "fulltrace")
"""Options of pytest itself that a test's process takes over beside those of the conftest files."""
WRONG_SETTING = 2
"""Exit code of `fitproof check` for a setting that is wrong, or a command that uses no card."""
PASSED_UNEXPECTEDLY = "[XPASS(strict)] "
"""How pytest begins the failure of a test that was to fail, and whose process knew nothing of its memory's limit."""
NUM_LARGEST = 5
NUM_OUTPUT_LINES = 30
SECONDS_TO_END = 30.0
KNOWN_BEFORE = pytest.StashKey[frozenset[str]]()
"""Names of the options that are no conftest file's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that accepts the memory that tests need now."""
    parser.addoption(
        UPDATE,
        action="store_true",
        help=f"write the baselines of tests marked {MARKER}, instead of comparing their memory with them",
    )


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Remember which options there are before conftest files add theirs."""
    early_config.stash[KNOWN_BEFORE] = frozenset(vars(early_config.known_args_namespace))
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; run marked tests elsewhere, or report to the pytest that has started this one for a test."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(gpu, max_allocated, max_reserved, ...): run the test on a simulated card and fail it if it needs "
        "more memory; the arguments are the settings of `fitproof check`",
    )
    options = os.environ.pop(OPTIONS, None)
    if options is None:
        config.pluginmanager.register(SimulatedTests())
    else:
        vars(config.option).update(json.loads(options))
        config.pluginmanager.register(ReportsToParent(config))


class ReportsToParent:
    """Writes the reports of this process's test to its output, for the pytest that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a report."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        print(f"\n{RECORD}{json.dumps(data, default=str)}", flush=True)  # noqa: T201


class SimulatedTests:
    """Runs marked tests in processes of their own, on simulated cards."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a marked test and report what its process reports; leave other tests to pytest."""
        if item.get_closest_marker(MARKER) is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports: list[pytest.TestReport] = []
        done = pytest.CallInfo.from_call(
            lambda: reports.extend(_run(item)), "call", (pytest.exit.Exception, KeyboardInterrupt)
        )
        if done.excinfo is not None:
            reports = [pytest.TestReport.from_item_and_call(item, done)]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        is_last = item.session.shouldfail or item.session.shouldstop
        # The test before has left the fixtures that it shares with this one, which only pytest's runner can end.
        state, until = item.session._setupstate, None if is_last else nextitem
        ended = pytest.CallInfo.from_call(lambda: state.teardown_exact(until), "teardown")
        if ended.excinfo is not None:
            item.ihook.pytest_runtest_logreport(report=pytest.TestReport.from_item_and_call(item, ended))
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _run(item: pytest.Item) -> list[pytest.TestReport]:
    """Return the reports of a test that has run on its card; it failed if it needs more memory than it may."""
    with tempfile.TemporaryDirectory(prefix="fitproof-") as folder:
        words = [*_check(item), "--", *_pytest(item, folder)]
        code, answer, output = _call(words, item.config)
    reports = _reports(item, output)
    checked = json.loads(answer) if answer else None
    error = "error: " + output.rpartition("error: ")[2].strip()
    if not reports or reports[-1].when != "teardown":
        pytest.fail(error if code == WRONG_SETTING else _of_early_end(checked, output), pytrace=False)
    call = next((report for report in reversed(reports) if report.when == "call"), None)
    if call is None:  # a fixture failed, or it is skipped
        return reports
    if checked is not None:
        call.sections.append((f"memory of {checked['card']}", checked["answer"]))
        peak = checked["peak"] or {}
        own = [(f"peak_{name}", peak[name]) for name in ("allocated_bytes", "reserved_bytes") if peak]
        reports[-1].user_properties += own  # the last report of a test has all of them
    if call.passed and code != 0:
        _fail(call, error if checked is None else _message(checked))
    elif checked is not None and str(call.longrepr).startswith(PASSED_UNEXPECTEDLY) and _is_too_large(checked):
        call.wasxfail = str(call.longrepr).removeprefix(PASSED_UNEXPECTEDLY)
        _fail(call, _message(checked))
    return reports


def _is_too_large(checked: dict[str, Any]) -> bool:
    """Whether a test needs more memory than it may, whatever its own outcome is."""
    return checked["verdict"] == "too large" or not all(one["is_met"] for one in checked["requirements"])


def _of_early_end(checked: dict[str, Any] | None, output: str) -> str:
    """Return what is said of a test whose process ended before it did."""
    last = re.sub(f"{RECORD}.*", "", output).splitlines()[-NUM_OUTPUT_LINES:]
    found = "" if checked is None else f" {checked['answer']}"
    return "\n".join((f"the test's process ended before the test did.{found}", "The end of its output:", *last))


def _fail(call: pytest.TestReport, message: str) -> None:
    """Make a report one of a failure; a test that is expected to fail has then failed as expected."""
    call.outcome = "skipped" if hasattr(call, "wasxfail") else "failed"
    call.longrepr = message


def _message(checked: dict[str, Any]) -> str:
    """Return what a failed check says: its answer with the line of the peak, and the largest tensors."""
    largest = [
        f"{one['bytes'] / 2**20:12,.1f} MiB  {one['purpose']} of {one['line']} ({one['made_by']})"
        for one in (checked["peak"] or {}).get("largest", [])[:NUM_LARGEST]
    ]
    return "\n".join([checked["answer"], *(["The largest tensors at the peak:", *largest] if largest else [])])


def _check(item: pytest.Item) -> list[str]:
    """Return the command that checks a test's memory, up to the test's own command."""
    marker = item.get_closest_marker(MARKER)
    assert marker is not None
    if marker.args:
        pytest.fail(
            f"{MARKER} takes settings of fitproof check by their names, and is given {marker.args[0]!r}; write for "
            f'example {MARKER}(gpu="a100", max_allocated="38GiB")',
            pytrace=False,
        )
    settings = {"steps": "all", "answer": "json", **marker.kwargs}
    if "baseline" in settings and item.config.getoption(UPDATE):
        settings["update"] = True
    written = {
        name: str(value).lower() if value in (True, False, None) else str(value) for name, value in settings.items()
    }
    return [sys.executable, "-m", "fitproof", "check", *(f"--{name}={value}" for name, value in written.items())]


def _pytest(item: pytest.Item, folder: str) -> Iterator[str]:
    """Yield the command that runs one test as this pytest would; `addopts` are left out: workers, other reports."""
    config, option = item.config, item.config.option
    yield from (sys.executable, "-m", "pytest", "-o", "addopts=", "-o", f"cache_dir={folder}")
    yield from ("--rootdir", str(config.rootpath), "--import-mode", option.importmode)
    if config.inipath is not None:
        yield from ("-c", str(config.inipath))
    if option.confcutdir is not None:
        yield from ("--confcutdir", option.confcutdir)
    given = {"-p": option.plugins, "-o": option.override_ini, "-W": option.pythonwarnings}
    for flag, values in given.items():
        for value in values or []:
            if value != "no:terminal":  # which a worker of xdist has
                yield from (flag, value)
    names = [node.name for node in item.listchain()]
    files = [isinstance(node, pytest.File) for node in item.listchain()]
    yield "::".join([str(item.path), *names[files.index(True) + 1 :]])  # a worker of xdist may change the test's id


def _call(words: list[str], config: pytest.Config) -> tuple[int, str, str]:
    """Return a command's exit code, its stdout and its stderr; it is ended if this process is interrupted."""
    known = config.stash.get(KNOWN_BEFORE, vars(config.option).keys())  # none, if a conftest file loads the plugin
    own = [name for name in vars(config.option) if name not in known]
    options = {name: getattr(config.option, name) for name in (*OUTPUT_OPTIONS, *own)}
    kept = {name: value for name, value in options.items() if isinstance(value, str | int | float | list | None)}
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_XDIST", "PYTEST_ADDOPTS"))
    }
    process = subprocess.Popen(
        words,
        cwd=config.invocation_params.dir,
        env={**inherited, OPTIONS: json.dumps(kept, default=str)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        answer, output = process.communicate()
    except BaseException:
        process.terminate()  # it ends what it has started
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return process.returncode, answer, output


def _reports(item: pytest.Item, output: str) -> list[pytest.TestReport]:
    """Return the reports of the last run of a test in the output of its process; it may have run twice."""
    reports: list[pytest.TestReport] = []
    for part in output.split(RECORD)[1:]:
        data, _ = json.JSONDecoder().raw_decode(part)
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        report.nodeid, report.location = item.nodeid, item.location
        if isinstance(report.longrepr, list):  # JSON has no tuples, and that of a skipped test is one
            report.longrepr = tuple(report.longrepr)
        reports = [report] if report.when == "setup" else [*reports, report]
    return reports
