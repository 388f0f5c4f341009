"""The claims: their commands exist, verdicts follow from measurements, and what was measured is not measured again."""

import csv
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import claims
import pandas as pd
import pytest
import yaml
from claims_evaluation import METRICS, NotMeasuredError, Row, run_metric, summarize, verdict
from claims_spec import Check, checks_of, read_claims
from conftest import ROOT
from exit_code import UNFINISHED

from pipeline.base.errors import InvalidInputError
from pipeline.cli import parse
from pipeline.config.experiment import make_experiment
from pipeline.config.given import nested
from pipeline.config.variants import load_entry_point

COMMAND = [sys.executable, str(ROOT / "benchmarks" / "claims.py"), "--short"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMITTED = ROOT / "benchmarks" / "claims_cpu_2026-11-21.csv"
TINY_MODEL = "--model gpt2-nano --causal_lm.num_layers 2 --causal_lm.width 32 --causal_lm.num_heads 2"
FORM = {
    "note": "Very small.",
    "values": {"gigabyte_mib": 10, "gigabyte_unit": "x 10 MiB"},
    "models": {"small": f"{TINY_MODEL} --vocabulary_size 512 --sequence_length 32 --num_steps 4"},
}
SAVED = {"what": "memory saved", "metric": "peak_allocated_mib", "compare": "saved_percent", "claimed": "50 ± 5"}


def claims_file(folder: Path, **measurement: Any) -> Path:
    """Write a file with the one claim `half`, and return it."""
    content = {
        "condition": "always",
        "each": {"size": ["small"]},
        "command": "main {model}",
        "runs": ["--precision bf16", "--precision fp32"],
        "checks": [SAVED],
        **measurement,
    }
    claim = {"says": "It saves half", "source": "a test", "measurements": [content]}
    return write_claims(folder, half=claim)


def write_claims(folder: Path, **entries: Any) -> Path:
    file = folder / "claims.yaml"
    settings = "--eval_steps 0 --timing_warmup_steps 2"
    file.write_text(yaml.safe_dump({"settings": settings, "forms": {"tiny": FORM}, "claims": entries}))
    return file


def row(
    outcome: str = "ok", losses: Sequence[float] = (), params: dict[str, Any] | None = None, **metrics: float
) -> Row:
    result = {"outcome": outcome, "detail": None, "steps": [{"loss": loss} for loss in losses]}
    return {"params": params or {}, "result": result, "skipped": None, "metrics": metrics}


def check(**changes: Any) -> Check:
    words = {"claim": "half", "condition": "always", "unit": "%", **SAVED, **changes}
    return Check(**words)


def saving(*percents: float) -> list[list[Row] | NotMeasuredError]:
    """Return rounds in which a variant saved this much of 100 MiB."""
    return [[row(peak_allocated_mib=100 - p), row(peak_allocated_mib=100)] for p in percents]


@pytest.mark.parametrize(
    ("claimed", "percents", "words"),
    [
        ("50 ± 5", (44, 46, 56), "holds, though 2 of 3 runs say otherwise"),
        ("50 ± 5", (45.1, 50, 54.9), "holds"),
        ("50 ± 5", (44, 44.9, 50), "does not hold, though 1 of 3 runs say otherwise"),
        ("65 to 80", (81, 82, 90), "does not hold"),
        ("at most 1", (0.5, 0.9, 0.9), "holds"),
        ("at most 1", (0.5, 1.1, 1.2), "does not hold, though 1 of 3 runs say otherwise"),
        ("at least 5", (4, 4.5, 4.9), "does not hold"),
        ("0", (0, 0, 0), "holds"),
        ("-3 to -1", (-2, -2, -2), "holds"),
    ],
)
def test_the_median_decides_and_contrary_runs_are_counted(claimed: str, percents: Sequence[float], words: str) -> None:
    assert check(claimed=claimed).evaluate(saving(*percents))["verdict"] == words


def test_a_run_without_the_metric_is_a_reason_and_not_a_number() -> None:
    lost: list[list[Row] | NotMeasuredError] = [[row("out_of_memory", peak_allocated_mib=99), row()]]
    skipped = {**row(), "result": None, "skipped": "tf32 needs a CUDA GPU"}
    found = check().evaluate(lost)
    assert (found["verdict"], found["runs"]) == ("not measured: out_of_memory", 0)
    assert math.isnan(found["median"])
    assert check().evaluate([[skipped, row()]])["verdict"] == "not measured: tf32 needs a CUDA GPU"
    assert check().evaluate([[row(), row()]])["verdict"] == "not measured: no peak_allocated_mib"
    assert check().evaluate([NotMeasuredError("not run yet")])["verdict"] == "not measured: not run yet"
    found = check().evaluate([*lost, *saving(48, 49)])
    assert (found["verdict"], found["runs"], found["median"]) == ("holds", 2, pytest.approx(48.5))


def test_comparisons_follow_from_what_runs_recorded() -> None:
    def found(compare: str, rows: list[Row], metric: str | None = None) -> float:
        return float(check(compare=compare, metric=metric, claimed="0").evaluate([rows])["median"])

    slow, fast = row(samples_per_second=8.0), row(samples_per_second=10.0)
    assert found("added_percent", [slow, fast], "seconds_per_sample") == pytest.approx(25)
    assert found("ratio", [slow, fast], "samples_per_second") == pytest.approx(0.8)
    calm, wild = row(losses=[4, 3.5, 3.5, 3]), row(losses=[4, 3, 3, 2])
    assert found("saved_percent", [calm, wild], "loss_change_std") == pytest.approx(50)
    assert found("difference_percent", [calm, wild], "losses") == pytest.approx(50)  # the last step's 3 and 2
    phases = {"allocated_after_backward_2_mib": 30.0, "allocated_after_optimizer_2_mib": 20.0}
    more, less = row(peak_allocated_mib=104.0), row(peak_allocated_mib=100.0, **phases)
    assert found("added_percent_of_gradients", [more, less], "peak_allocated_mib") == pytest.approx(40)
    straight = [row(params={"accumulation_steps": n}, seconds_per_step=1 + n / 10) for n in (1, 2, 4, 8)]
    assert found("linear_fit_error_percent", straight, "seconds_per_step") == pytest.approx(0, abs=1e-6)
    bent = [row(params={"accumulation_steps": n}, seconds_per_step=1 + n * n / 10) for n in (1, 2, 4, 8)]
    assert found("linear_fit_error_percent", bent, "seconds_per_step") > 20
    fits, beyond = (row(outcome, params={"micro_batch_size": n}) for n, outcome in ((4, "ok"), (8, "over_budget")))
    assert (found("largest_that_fits", [fits, beyond]), found("largest_that_fits", [beyond])) == (4, 0)
    assert (found("completed_percent", [fits]), found("completed_percent", [row("out_of_memory")])) == (100, 0)
    assert check(compare="completed_percent").evaluate([[row("crashed")]])["verdict"] == "not measured: crashed"
    in_gigabytes = check(compare="gigabytes", divisor=10.0, claimed="3").evaluate([[row(peak_allocated_mib=30.0)]])
    assert in_gigabytes["verdict"] == "holds"


def test_a_summary_names_the_conditions_under_which_a_claim_holds() -> None:
    small, large = check(condition="batch 2"), check(condition="batch 32")
    held, failed, other = small.evaluate(saving(50)), large.evaluate(saving(20)), check(what="time").evaluate(saving(1))
    unknown = large.evaluate([NotMeasuredError("out_of_memory")])

    def verdicts(*lines: dict[str, Any]) -> list[str]:
        return list(summarize(pd.DataFrame(lines)).verdict)

    partly, never = summarize(pd.DataFrame([held, other, failed])).to_dict("records")
    assert (partly["claimed"], partly["measured"], partly["conditions"]) == ("50 ± 5 %", "20 to 50 %", 2)
    assert partly["verdict"] == "holds only in 1 of 2 conditions (batch 2)"
    assert never["verdict"] == "does not hold: measured 1 % against 50 ± 5 %"
    assert verdicts(held, unknown) == ["holds; 1 of 2 conditions not measured: out_of_memory"]
    assert verdicts(unknown) == ["not measured: out_of_memory"]


def test_the_committed_measurements_give_the_committed_verdicts() -> None:
    """Three runs each: the least, the median and the greatest are all of them."""
    checks = {(one.claim, one.what, one.condition): one for one in every_check("tiny")}
    lines = list(csv.DictReader(COMMITTED.read_text().splitlines()))
    assert {(line["claim"], line["figure"], line["condition"]) for line in lines} == set(checks)
    table = []
    for line in lines:
        one = checks[line["claim"], line["figure"], line["condition"]]
        found = verdict(one.claimed, [float(line[name]) for name in ("least", "median", "greatest")])
        assert (found, one.unit) == (line["verdict"], line["unit"]), line
        numbers = {"median": float(line["median"]), "runs": int(line["runs"]), "verdict": found}
        table.append({**vars(one), **numbers})
    page = COMMITTED.with_suffix(".md").read_text()
    for found in summarize(pd.DataFrame(table)).itertuples():
        end = f"| {found.measured} | {found.verdict} |"
        assert re.search(rf"\| {re.escape(str(found.what))} \| .*{re.escape(end)}", page), end


def every_check(form: str) -> list[Check]:
    """Return the checks of all claims, as if micro-batches of up to 8 were predicted to fit."""
    entries = read_claims(claims.FILE)
    return [one for name in entries.claims for one in checks_of(entries, name, form, lambda command: PLANNED)]


PLANNED = [
    {"choice": {"precision": p, "checkpointing": c}, "micro_batch_size": size, "fits": size <= 8}
    for p, c in (("fp32", "none"), ("bf16", "every_layer"))
    for size in (32, 1, 2, 4, 8, 16)
]


def test_every_command_of_every_claim_is_valid_and_every_row_exists() -> None:
    entries = read_claims(claims.FILE)
    runs: dict[str, str] = {}

    def predict(form: str, command: str) -> list[Row]:
        runs[command] = form
        return PLANNED

    for form, name in itertools.product(entries.forms, entries.claims):
        for one in checks_of(entries, name, form, partial(predict, form)):
            runs |= dict.fromkeys((f"{run} " for run in one.runs), form)
    rows = {entry: rows_of(entry) for entry in {run.split()[0] for run in runs if " @ " in run}}
    assert {"plan", "main", *rows} == {run.split()[0] for run in runs}
    parsed = set()
    for run, form in runs.items():
        command, _, chosen = run.strip().partition(" @ ")
        assert chosen in rows.get(command.split()[0], {""}), run
        entry, *words = shlex.split(command if command.startswith("plan ") else f"{command} {entries.settings}")
        names, values = words[::2], words[1::2]
        if (entry, *names) not in parsed:  # parsing takes long
            parse(entry, words)
            parsed.add((entry, *names))
        given = {name.removeprefix("--"): value for name, value in zip(names, values, strict=True)} | {"device": "cpu"}
        given.pop("gpu", None)
        try:
            make_experiment(nested(given), entry)
        except InvalidInputError as error:
            too_large = "budget cannot be more than the device's memory" in str(error)
            assert too_large and form != "tiny", f"{run}: {error}"  # cards of the long form need not fit this machine


def rows_of(entry: str) -> set[str]:
    return {f"{variant.comparison}/{variant.name}" for variant in load_entry_point(entry, {}).variants}


@pytest.mark.parametrize(
    ("fitting", "sizes"),
    [((1, 2, 4, 8), [8, 16]), ((1, 2, 4, 8, 16, 32), [32]), ((), [1])],
    ids=["some fit", "all fit", "none fits"],
)
def test_a_plan_names_the_micro_batches_on_both_sides_of_the_limit(
    fitting: tuple[int, ...], sizes: list[int], tmp_path: Path
) -> None:
    planned = [{**line, "fits": line["micro_batch_size"] in fitting} for line in PLANNED]
    planned += [{**line, "choice": {"precision": "fp16"}, "fits": True} for line in PLANNED]
    found = checks_with_plan(tmp_path, planned)
    assert [int(run.split()[-1]) for run in found.runs] == sizes
    assert found.condition == f"micro-batch {sizes[0]}"


def checks_with_plan(folder: Path, planned: list[Row] | NotMeasuredError) -> Check:
    def predict(command: str) -> list[Row]:
        if isinstance(planned, NotMeasuredError):
            raise planned
        return planned

    runs = ["--micro_batch_size {fits}", "--micro_batch_size {exceeds}"]
    fields = {"condition": "micro-batch {fits}", "plan": "plan {model}", "where": {"precision": "fp32"}, "runs": runs}
    [found] = checks_of(read_claims(claims_file(folder, **fields)), "half", "tiny", predict)
    return found


def test_without_a_plan_nothing_is_run_and_the_check_has_the_reason(tmp_path: Path) -> None:
    found = checks_with_plan(tmp_path, NotMeasuredError("the parameters must fit the budget"))
    assert (found.runs, found.reason, found.condition) == ((), "the parameters must fit the budget", "micro-batch ?")


@pytest.mark.parametrize(
    ("measurement", "message"),
    [
        ({"checks": [{**SAVED, "metric": "peak_mib"}]}, "metric must be one of final_loss, peak_allocated_mib"),
        ({"checks": [{**SAVED, "compare": "faster"}]}, "compare must be one of gigabytes, ratio, saved_percent"),
        ({"checks": [{**SAVED, "claimed": "about 50"}]}, "must be written as '50 ± 5', '65 to 80', .* is 'about 50'"),
        ({"checks": []}, "half.measurements.0.checks"),
        ({"checks": [{"what": "memory saved"}]}, "half.measurements.0.checks.0.claimed: Field required"),
        ({"comand": "main"}, "half.measurements.0.comand: Extra inputs are not permitted"),
        ({"runs": ["--micro_batch_size {batch}"]}, "claim half, form tiny: placeholders .* value \\('batch'\\)"),
        ({"runs": ["--micro_batch_size {exceeds}"]}, "placeholders .* value \\('exceeds'\\)"),
        ({"each": {"size": ["huge"]}}, "placeholders and models must have a value \\('huge'\\)"),
        ({"only": {"smal": {"size": []}}}, "half.measurements.0.only.smal"),
        ({"condition": "{"}, "claim half, form tiny: placeholders .* \\(.*'{'"),
    ],
)
def test_an_invalid_entry_is_reported_by_its_name(measurement: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_claims(claims_file(tmp_path, **measurement))


def test_a_file_that_is_no_yaml_is_reported(tmp_path: Path) -> None:
    (tmp_path / "claims.yaml").write_text("claims: [")
    for file in (tmp_path / "claims.yaml", tmp_path / "missing.yaml"):
        with pytest.raises(InvalidInputError, match=f"must be a readable YAML file, and {file} is not"):
            read_claims(file)


@pytest.mark.slow
def test_entry_points_are_run_once_and_their_results_become_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = {
        "condition": "{format}",
        "each": {"size": ["small"], "format": ["bf16", "tf32"]},
        "command": "precision {model} --gradient_underflow false",
        "runs": ["@ formats/{format}", "@ formats/fp32"],
        "checks": [SAVED],
    }
    limit = {
        "condition": "the limit",
        "each": {"size": ["small"]},
        "plan": "plan {model} --gpu cpu --budget 6MiB --effective_batch_size 32 --precision fp32 --checkpointing none "
        "--loss_kernel full --gelu model --attention sdpa",
        "where": {"precision": "fp32", "checkpointing": "none"},
        "command": "main {model} --budget 6MiB --effective_batch_size 32",
        "runs": ["--micro_batch_size {exceeds}"],
        "checks": [{"what": "largest", "compare": "largest_that_fits", "claimed": "at least 32"}],
    }
    wrong = {
        "condition": "no sequence",
        "each": {"size": ["small"]},
        "runs": ["main {model} --micro_batch_size 0"],
        "checks": [{"what": "it runs", "compare": "completed_percent", "claimed": "100"}],
    }
    entries = {
        name: {"says": f"About {name}", "source": "a test", "measurements": [one]}
        for name, one in (("formats", formats), ("limit", limit), ("wrong", wrong))
    }
    monkeypatch.setattr(claims, "FILE", write_claims(tmp_path, **entries))
    words = ["--device", "cpu", "--tiny", "--runs", "1", "--folder", str(tmp_path), "--work", str(tmp_path / "work")]
    assert claims.main(words) == 0
    assert entry_points_run(capsys.readouterr().out) == ["plan", "main", "main", "precision"]
    assert claims.main(words) == 0
    assert entry_points_run(capsys.readouterr().out) == ["main"]  # the one with the wrong setting, which is tried again

    measured = measured_rows(tmp_path / "work")
    peaks = {one["params"]["precision"]: one["metrics"]["peak_allocated_mib"] for one in measured["precision"]}
    found = lines_of(tmp_path)
    assert float(found["formats", "bf16"]["median"]) == pytest.approx(100 * (1 - peaks["bf16"] / peaks["fp32"]), 1e-4)
    assert found["formats", "bf16"]["verdict"] == "does not hold"
    assert found["formats", "tf32"]["verdict"].startswith("not measured: tf32 needs a CUDA GPU")
    [exceeding] = measured["main"]
    assert (exceeding["result"]["outcome"], exceeding["params"]["micro_batch_size"]) == ("over_budget", 16)
    assert found["limit", "the limit"]["median"] == "0"
    assert found["wrong", "no sequence"]["verdict"].startswith("not measured: micro_batch_size must be greater than")
    assert all(run_metric(exceeding, metric) is not None for metric in METRICS)

    [file] = tmp_path.glob("claims_cpu_*.md")
    page = file.read_text()
    assert "lack runs" not in page
    assert "| **limit**: About limit | largest | [1](#limit) | at least 32 sequences |" in page
    assert re.search(r"--micro_batch_size \d+ \| over_budget \| 1 \| its peak of [\d.]+ MiB is over the budget", page)
    assert re.search(r"\| torch \| \d", page) and "Source: a test." in page


def entry_points_run(output: str) -> list[str]:
    """Return the first words of the commands that were run: plans in their order, then the others by name."""
    found = re.findall(r"^\d+ of \d+: (\w+)", output, re.MULTILINE)
    return [name for name in found if name == "plan"] + sorted(name for name in found if name != "plan")


def measured_rows(work: Path) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for file in work.glob("*/*/findings.json"):
        content = json.loads(file.read_text())
        if "rows" in content:
            found.setdefault(content["entry"], []).extend(one for one in content["rows"] if one["result"])
    return found


def lines_of(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    [file] = folder.glob("claims_cpu_*.csv")
    return {(line["claim"], line["condition"]): line for line in csv.DictReader(file.read_text().splitlines())}


def test_without_time_nothing_runs_and_the_table_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--short",
        "--device",
        "cpu",
        "--tiny",
        "--claims",
        "encoder,cards",
        "--minutes",
        "1e-9",
        "--folder",
        str(tmp_path),
    ]
    assert claims.main([*words, "--work", str(tmp_path / "work")]) == UNFINISHED
    assert "not complete: the same command goes on with what is left (10)" in capsys.readouterr().err
    lines = lines_of(tmp_path).values()
    assert {line["verdict"] for line in lines} == {"not measured: not run yet"}
    assert {line["claim"] for line in lines} == {"encoder", "cards"}
    [page] = tmp_path.glob("claims_cpu_*.md")
    assert "10 of 10 checks lack runs: the same command continues." in page.read_text()


@pytest.mark.slow
def test_interrupted_or_killed_the_same_command_continues(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--claims", "encoder,billion", "--runs", "1", "--folder", str(tmp_path)]
    command = [*COMMAND, *words, "--work", str(tmp_path / "work")]
    for kind, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            next(line for line in process.stdout if re.match(r"1 of \d:", line))
            process.send_signal(kind)
            process.wait()
        assert process.returncode == code
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert re.findall(r"^\d of \d:", done.stdout, re.MULTILINE) == ["1 of 2:", "2 of 2:"]
    assert {line["runs"] for line in lines_of(tmp_path).values()} == {"1"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda:99"], "needs a CUDA GPU, and this machine has"),
        (["--device", "cuda:99"], "which here means: --device cpu --tiny"),
        (["--device", "cpu"], "GPT-2 must be trained on a GPU, and the device is cpu; add --tiny"),
        (["--tiny", "--claims", "precison"], "no claim is called 'precison'; the claims are precision, accumulation"),
        (["--tiny", "--runs", "0"], "--runs must be 1 or more, and is 0"),
        (["--tiny", "--minutes", "0"], "--minutes must be more than 0, and is 0"),
        (["--tiny", "--folder", "/proc/tables"], "and /proc/tables cannot (No such file or directory)"),
        (["--tiny", "--work", "/proc/work"], "name another with --folder and --work"),
    ],
)
def test_bad_input_is_answered_before_anything_runs(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--folder", str(tmp_path), "--work", str(tmp_path / "work")]
    assert claims.main(["--device", "cpu", *folders, *words]) == 2
    assert message in capsys.readouterr().err
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
