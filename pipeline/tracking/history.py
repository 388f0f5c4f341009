"""Reads runs of the MLflow tracking store as the Rows of a report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.entities import PagedList
from mlflow.tracking import get_tracking_uri

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome, Result, StepRecord
from pipeline.config.given import dotted, nested, validate
from pipeline.config.settings import TECHNIQUES, AllSettings
from pipeline.tracking.metric_names import PHASES_MIB, STEP, SUMMARIES, phases_of, summaries_of
from pipeline.tracking.store import connect, unreachable
from pipeline.training.metrics import PREDICTION, Row
from pipeline.training.time_differences import ERROR
from pipeline.training.timing import timing_of

SPEEDS = ("tokens_per_second", "samples_per_second", "padding_percent")
PER_STEP = ("loss", "grad_norm", "seconds", "learning_rate", "loss_scale", *SPEEDS)
"""Metrics of an optimizer step that are read back."""
CONDITIONS = ("device_name", "torch", "transformers", "cuda", "allocator")
"""Tags that say under which conditions a run was measured."""
OUTCOMES = {"FINISHED": Outcome.OK, "FAILED": Outcome.CRASHED}
"""What a run that says no outcome came to, by its status; one that is killed or still running is interrupted."""
IN_A_PAGE = 1000
"""Runs or experiments that are read at once."""


class History:
    """The runs of the tracking store."""

    def __init__(self) -> None:
        try:
            self._client = connect()
            self._experiments = {e.name: e.experiment_id for e in _all_pages(self._client.search_experiments)}
        except Exception as error:  # any error of a store, its driver or its network
            raise unreachable(error) from error

    def by_id(self, ids: Sequence[str]) -> list[Run]:
        """Return these runs; a parent's id stands for its children, that of a simulation for itself.

        Raises:
            InvalidInputError: there is no such run, or neither it nor a child of it has metrics.

        """
        found: list[Run] = []
        for run_id in ids:
            try:
                run = self._client.get_run(run_id)
            except MlflowException as error:
                raise InvalidInputError(
                    f"no run has the id {run_id!r} in {get_tracking_uri()}; take ids from the MLflow UI"
                ) from error
            children = self._search([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'")
            measured = [child for child in reversed(children) if _is_measured(child)]  # in the order in which they ran
            runs = measured or ([run] if _is_measured(run) or is_simulation(run) else [])
            if not runs:
                raise InvalidInputError(
                    f"a run to compare must have metrics of its own or of its children, and {run.info.run_name} "
                    f"({run_id}) has neither; leave it out"
                )
            found += runs
        return list({run.info.run_id: run for run in found}.values())

    def file(self, run: Run, name: str, folder: Path) -> Path:
        """Copy a file that a run has logged into a folder, and return its path there."""
        return Path(self._client.download_artifacts(run.info.run_id, name, str(folder)))

    def by_filter(self, experiment: str | None, filter_string: str | None) -> list[Run]:
        """Return the measured runs of an experiment (of all by default) that the filter lets through, newest first.

        Raises:
            InvalidInputError: no experiment has this name, the filter is malformed, or no measured run matches.

        """
        ids = self._experiments
        if experiment is not None and experiment not in ids:
            raise InvalidInputError(
                f"no experiment is called {experiment!r}; the experiments are {', '.join(sorted(ids))}"
            )
        experiments = list(ids.values()) if experiment is None else [ids[experiment]]
        try:
            runs = self._search(experiments, filter_string or "")
        except MlflowException as error:
            raise InvalidInputError(
                f"filter must be a filter string of MLflow: {str(error).splitlines()[0]}; write for example "
                f"\"params.precision = 'bf16' and metrics.`{SUMMARIES['final_loss']}` < 7\""
            ) from error
        measured = [run for run in runs if _is_measured(run)]
        if not measured:
            raise InvalidInputError(
                f"at least one run with metrics must match, and of {len(runs)} that match "
                f"experiment={experiment or 'none'} filter={filter_string or 'none'} none has any; widen the selection"
            )
        return measured

    def row(self, run: Run, baseline: bool, name: str, comparison: str) -> Row:
        """Return a run as the row of a report, with the optimizer steps that MLflow has of it."""
        tags, params = run.data.tags, _typed(run.data.params)
        params |= {name: tags[name] for name in CONDITIONS if name in tags}
        digests = [entry.dataset.digest for entry in run.inputs.dataset_inputs]
        params |= {"corpus_digest": ", ".join(digests)} if digests else {}
        metrics = summaries_of(run.data.metrics) | phases_of(self._series(run, PHASES_MIB))
        steps = tuple(self._steps(run))
        warmup_steps = params.get("timing_warmup_steps")
        timing = timing_of(steps, warmup_steps) if isinstance(warmup_steps, int) and ERROR not in metrics else None
        known = tags.get("outcome") in set(Outcome)
        outcome = Outcome(tags["outcome"]) if known else OUTCOMES.get(run.info.status, Outcome.INTERRUPTED)
        result = Result(
            outcome=outcome,
            detail=tags.get("outcome_detail"),
            steps=steps,
            seconds_total=metrics.get("seconds_total", 0.0),
        )
        return Row(
            comparison=comparison,
            name=name,
            is_baseline=baseline,
            params=params,
            result=result,
            skipped=None,
            metrics=metrics,
            timings=() if timing is None else (timing,),
            prediction=tags.get(PREDICTION),
        )

    def _steps(self, run: Run) -> list[StepRecord]:
        """Return the optimizer steps of which the loss and the time are known."""
        series = {name: self._series(run, STEP + name) for name in PER_STEP}
        steps = sorted(series["loss"].keys() & series["seconds"].keys())
        rates, norms, scales = (series[name] for name in ("learning_rate", "grad_norm", "loss_scale"))
        speeds, samples, paddings = (series[name] for name in SPEEDS)
        amounts = {step: speeds.get(step, samples.get(step, 0.0)) * series["seconds"][step] for step in steps}
        return [
            StepRecord(
                step=step,
                loss=series["loss"][step],
                grad_norm=norms.get(step, float("nan")),
                seconds=series["seconds"][step],
                tokens=round(amounts[step]) if step in speeds else None,  # those of a command are not counted
                positions=round(amounts[step] / (1 - paddings.get(step, 0.0) / 100)),
                learning_rate=rates.get(step, float("nan")),
                loss_scale=scales.get(step),
                skipped=step in scales and step not in norms,
            )
            for step in steps
        ]

    def _series(self, run: Run, name: str) -> dict[int, float]:
        if name not in run.data.metrics:
            return {}
        return {point.step: point.value for point in self._client.get_metric_history(run.info.run_id, name)}

    def _search(self, experiments: list[str], filter_string: str) -> list[Run]:
        """Return all runs that the filter lets through, newest first; one that starts meanwhile moves the others on."""
        newest_first = ["attributes.start_time DESC"]
        active = ViewType.ACTIVE_ONLY
        search = partial(self._client.search_runs, experiments, filter_string, active, order_by=newest_first)
        return list({run.info.run_id: run for run in _all_pages(search)}.values())


def _all_pages(search: Callable[..., PagedList[Any]]) -> Iterator[Any]:
    """Yield all that a search finds, of which MLflow returns a page at a time."""
    found = search(max_results=IN_A_PAGE)
    yield from found
    while found.token:
        found = search(max_results=IN_A_PAGE, page_token=found.token)
        yield from found


def is_simulation(run: Run) -> bool:
    """Return whether a run is one of `simulate`, which alone has this tag."""
    return "verdict" in run.data.tags


def _is_measured(run: Run) -> bool:
    """Return whether a run has metrics, or is one of a job's that came to none; not the job itself."""
    if "technique" in run.data.tags and "mlflow.parentRunId" not in run.data.tags:
        return False
    is_of_job = "outcome" in run.data.tags and "mlflow.parentRunId" in run.data.tags
    return is_of_job or {"peak_allocated_mib", "seconds_per_step"} <= set(summaries_of(run.data.metrics))


def _typed(params: Mapping[str, str]) -> dict[str, Any]:
    """Parse params, which MLflow stores as text, to settings, with the defaults of techniques that are not in use.

    A param that is not a setting stays text.
    """
    try:
        settings = validate(AllSettings, nested(params), "compare")
    except InvalidInputError:
        return dict(params)
    values = dict(dotted(settings.model_dump(mode="json")))
    left_out = {name for technique in TECHNIQUES.values() for name in technique.model_fields if "model" in params}
    return {name: value for name, value in values.items() if name in params or name in left_out}
