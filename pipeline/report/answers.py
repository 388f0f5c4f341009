"""The answer of a comparison: figures, one sentence, and the command that goes on."""

from collections import Counter
from collections.abc import Mapping, Sequence

from pipeline.base.results import Outcome
from pipeline.report.changes import NOISE, more_or_less, time_in_words
from pipeline.report.command import command_of
from pipeline.report.comparable import of_other_data
from pipeline.report.other_trainings import changes
from pipeline.report.page import Headline
from pipeline.report.plot import mib_text, short
from pipeline.report.sections import LADDER
from pipeline.training.metrics import Row
from pipeline.training.time_differences import MARGIN, MEASURED, TimeDifference, difference, is_compared, time_change

NUM_FIGURES = 4
MOST_RIVALS = 3
"""Rivals of the fastest variant that a sentence names."""
LEAST_SAVING_PERCENT = 1.0
"""Saving of memory from which on the answer of one of several comparisons is the variant that saves most."""


def readable(name: str) -> str:
    """Return the name of one of several comparisons in words."""
    return "one after another" if name == LADDER else name.replace("_", " ")


def answer(rows: Sequence[Row]) -> str:
    """Return the answer of one comparison as a sentence."""
    return f"{_within_budget(rows)}{_least_answer(rows)}"


def _within_budget(rows: Sequence[Row]) -> str:
    """Return how many of several runs stayed within the budget, if all have the same one."""
    budgets = {row.params.get("budget") for row in rows}
    if len(rows) < 2 or len(budgets) != 1 or budgets <= {None, "none"}:
        return ""
    fitting = sum(row.outcome is Outcome.OK for row in rows)
    return f"{fitting} of {len(rows)} trained within the budget of {budgets.pop()}. "


def _least_answer(rows: Sequence[Row]) -> str:
    """Return which variants need the least memory and time."""
    baseline, others = _baseline(rows), _compared(rows)
    if baseline is None:
        ended = sum(row.completed for row in rows)
        return f"{ended} of {len(rows)} runs completed; the baseline was not measured."
    if not others:
        metrics = baseline.metrics
        margin = f" (± {metrics[MARGIN]:.0f} %)" if MARGIN in metrics else ""
        return (
            f"{baseline.name} peaks at {metrics['peak_allocated_mib']:,.1f} MiB and takes "
            f"{short(metrics['seconds_per_step'])} s per optimizer step{margin}{_failures(rows)}."
        )
    smallest, fastest = _smallest(others), _faster(others)
    is_smaller = smallest.metrics["memory_saving_percent"] > 0
    if smallest is fastest and is_smaller:
        what = f"uses the least memory and time{_rivals(smallest, others)}"
        return f"{smallest.name} {what}: {_against(smallest)}{_failures(rows)}."
    memory = f"{smallest.name} uses the least memory: {_against(smallest)}"
    if fastest is not None:
        time = f"{fastest.name} is the fastest{_rivals(fastest, others)}: {_against(fastest)}"
    else:
        are_slower = all(_time(row).low > 0 for row in others)
        time = f"None is faster than {baseline.name}{'' if are_slower else ' beyond noise'}"
    return f"{memory if is_smaller else f'None uses less memory than {baseline.name}'}. {time}{_failures(rows)}."


def short_answer(rows: Sequence[Row]) -> str:
    """Return the answer of one of several comparisons: the variant that saves most, of memory or else of time."""
    baseline, others = _baseline(rows), _compared(rows)
    if baseline is None or not others:
        return answer(rows)
    best, best_at, fastest = _smallest(others), "saves the most memory", _faster(others)
    if best.metrics["memory_saving_percent"] < LEAST_SAVING_PERCENT and fastest is not None:
        best, best_at = fastest, f"is the fastest{_rivals(fastest, others)}"
    elif best.metrics["memory_saving_percent"] <= 0 and len(others) > 1:
        return answer(rows)
    what = f"{best.name} {best_at}:" if len(others) > 1 else f"{best.name}:"
    return f"{what} {_against(best)}{_failures(rows)}."


def headlines(comparisons: Mapping[str, Sequence[Row]]) -> tuple[Headline, ...]:
    """Return the figures of the answer: least memory and time of the main comparison, losses and outcomes of all."""
    rows = [row for each in comparisons.values() for row in each]
    if len(rows) == 1:
        return _of_one(rows[0])
    found = [*_least(_main(comparisons)), *_losses(rows)]
    incomplete = [row for row in rows if not row.completed]
    if incomplete:
        count = Counter(outcome_of(row).replace("_", " ") for row in incomplete)
        detail = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
        found.append(
            Headline(title="completed", value=f"{len(rows) - len(incomplete)} of {len(rows)} runs", detail=detail)
        )
    return tuple(found)


def commands(comparisons: Mapping[str, Sequence[Row]]) -> tuple[tuple[str, str], ...]:
    """Return the command that profiles the only run of one process, or runs the best one again, after what it does."""
    best = _best(comparisons)
    if best is None:
        return ()
    rows = [row for each in comparisons.values() for row in each]
    if len(rows) == 1 and best.params.get("world_size", 1) == 1:
        return (("Profile it", command_of("profiling", best.params)),)
    of = "" if len(comparisons) == 1 else f"{readable(best.comparison)}: "
    return ((f"Run again ({of}{best.name})", command_of("main", best.params)),)


def _main(comparisons: Mapping[str, Sequence[Row]]) -> Sequence[Row]:
    """Return the comparison that answers the question: the first one of which a variant compares with its baseline."""
    return next((rows for rows in comparisons.values() if _compared(rows)), next(iter(comparisons.values())))


def _best(comparisons: Mapping[str, Sequence[Row]]) -> Row | None:
    """Return the variant of the main comparison that is the fastest, or saves most memory if none is faster.

    Only what is beyond noise is faster; where no variant saves anything it is the baseline. Without a baseline it is
    the fastest of all; None if no run completed.
    """
    others = _compared(_main(comparisons))
    if not others:
        ended = [row for rows in comparisons.values() for row in rows if row.completed]
        return max(ended, key=lambda row: row.metrics.get("samples_per_second", 0.0), default=None)
    smallest = _smallest(others)
    saving = smallest if smallest.metrics["memory_saving_percent"] > 0 else None
    return _faster(others) or saving or _baseline(_main(comparisons))


def outcome_of(row: Row) -> str:
    """Return the outcome of the row's run."""
    return "skipped" if row.outcome is None else row.outcome.value


def _of_one(row: Row) -> tuple[Headline, ...]:
    """Return the cost of a single run."""
    metrics, found = row.metrics, []
    if "peak_allocated_mib" in metrics:
        error = metrics.get("prediction_error_percent")
        detail = "" if error is None else f"prediction error {abs(error):.2f} %"
        found.append(Headline(title="peak memory", value=peak_text(row), detail=detail))
    if "seconds_per_step" in metrics:
        detail = f"{metrics['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in metrics else ""
        found.append(
            Headline(title="time per optimizer step", value=f"{short(metrics['seconds_per_step'])} s", detail=detail)
        )
    if "final_loss" in metrics:
        detail = f"mean over all steps {metrics['mean_loss']:.4g}" if "mean_loss" in metrics else ""
        found.append(Headline(title="final loss", value=f"{metrics['final_loss']:.4g}", detail=detail))
    if "eval_loss" in metrics:
        found.append(Headline(title="held-out loss", value=f"{metrics['eval_loss']:.4g}", detail="after the last step"))
    if not row.completed:
        found.insert(0, Headline(title="outcome", value=outcome_of(row).replace("_", " "), detail="lower bounds"))
    return tuple(found[:NUM_FIGURES])


def _least(rows: Sequence[Row]) -> list[Headline]:
    """Return the least memory and time of a comparison, and whose they are; the answer has them in percent."""
    baseline, others = _baseline(rows), _compared(rows)
    if baseline is None or not others:
        return []
    smallest, fastest = _smallest(others), _faster(others)
    if smallest.metrics["memory_saving_percent"] <= 0:
        smallest = baseline
    noise = "" if fastest or all(_time(row).low > 0 for row in others) else f"; others: {NOISE}"
    fastest = fastest or baseline
    return [
        Headline(title="least memory", value=peak_text(smallest), detail=_whose(smallest, peak_text(baseline))),
        Headline(
            title="least time per sample",
            value=time_text(fastest),
            detail=f"{_whose(fastest, time_text(baseline))}{noise}",
        ),
    ]


def _whose(row: Row, baseline: str) -> str:
    return f"{row.name}, the baseline" if row.is_baseline else f"{row.name}; baseline {baseline}"


def _losses(rows: Sequence[Row]) -> list[Headline]:
    """Return how far the losses of variants that are the same training differ; else the lowest held-out loss."""
    same = [row for row in rows if "max_loss_difference" in row.metrics and not row.is_baseline and not changes(row)]
    if same:
        worst = max(same, key=lambda row: row.metrics["max_loss_difference"])
        value = f"{worst.metrics['max_loss_difference']:.2g}"
        return [Headline(title="largest loss difference", value=value, detail=f"in any step: {worst.name}")]
    held_out = [row for row in rows if "eval_loss" in row.metrics]
    if not held_out or any(of_other_data(row, held_out[0]) for row in held_out):
        return []
    lowest = min(held_out, key=lambda row: row.metrics["eval_loss"])
    return [Headline(title="lowest held-out loss", value=f"{lowest.metrics['eval_loss']:.4g}", detail=lowest.name)]


def _baseline(rows: Sequence[Row]) -> Row | None:
    """Return the baseline if it completed and was measured."""
    return next((row for row in rows if row.is_baseline and row.completed and set(row.metrics) >= MEASURED), None)


def _compared(rows: Sequence[Row]) -> list[Row]:
    """Return the variants that were measured against the baseline; those over the budget if there are no others."""
    found = [row for row in rows if is_compared(row)]
    return [row for row in found if row.outcome is Outcome.OK] or found


def _smallest(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row.metrics["memory_saving_percent"])


def _faster(rows: Sequence[Row]) -> Row | None:
    """Return the variant that takes the least time against its baseline; None if none takes less beyond noise."""
    return min((row for row in rows if _time(row).is_faster), key=lambda row: _time(row).percent, default=None)


def _time(row: Row) -> TimeDifference:
    found = time_change(row)
    assert found is not None
    return found


def _rivals(fastest: Row, others: Sequence[Row]) -> str:
    """Return which variants of its comparison may be as fast, in brackets."""
    rivals = [
        row.name
        for row in others
        if row is not fastest and (found := difference(row, fastest)) is not None and not found.is_beyond_noise
    ]
    if not rivals:
        return ""
    return f" ({NOISE} to {', '.join(rivals) if len(rivals) <= MOST_RIVALS else f'{len(rivals)} others'})"


def _failures(rows: Sequence[Row]) -> str:
    """Return how many variants ran but did not complete, as the end of a sentence."""
    failed = [row for row in rows if row.result is not None and not row.completed]
    return f"; {len(failed)} of {len(rows)} did not complete" if failed else ""


def _against(row: Row) -> str:
    memory = more_or_less(0.0 - row.metrics["memory_saving_percent"], "memory")
    over = ", over the budget" if row.outcome is Outcome.OVER_BUDGET else ""
    return f"{memory} and {time_in_words(_time(row))}{over}"


def peak_text(row: Row) -> str:
    """Return the peak of a run with its unit."""
    return mib_text(row.metrics["peak_allocated_mib"])


def time_text(row: Row) -> str:
    """Return the time that a run takes for a sample with its unit."""
    seconds = 1 / row.metrics["samples_per_second"]
    return f"{short(seconds)} s" if seconds >= 1 else f"{short(1000 * seconds)} ms"
