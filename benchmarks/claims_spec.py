"""claims.yaml -> the checks of each claim under every condition, with the commands that measure them."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from claims_evaluation import COMPARISONS, METRICS, WITHOUT_METRIC, NotMeasuredError, Row, range_of, verdict
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.base.errors import InvalidInputError

FormName = Literal["full", "short", "tiny"]


class Entry(BaseModel):
    """A part of claims.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class CheckEntry(Entry):
    """One metric of a measurement, how its runs are compared, and the claimed range."""

    what: str
    compare: str
    claimed: str
    metric: str | None = None

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        if self.compare not in COMPARISONS:
            raise ValueError(f"compare must be one of {', '.join(COMPARISONS)}")
        if self.metric not in METRICS and self.compare not in WITHOUT_METRIC:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}")
        return self


class Measurement(Entry):
    """The conditions, the commands and the checks of a claim or of a part of it."""

    condition: str
    each: dict[str, list[Any]]
    only: dict[FormName, dict[str, list[Any]]] = {}
    plan: str | None = None
    where: dict[str, str] = {}
    command: str = ""
    runs: tuple[str, ...] = Field(min_length=1)
    checks: tuple[CheckEntry, ...] = Field(min_length=1)


class Claim(Entry):
    """A common claim, its source, and how it is measured."""

    says: str
    source: str
    measurements: tuple[Measurement, ...] = Field(min_length=1)


class Form(Entry):
    """The sizes at which claims are measured: values of placeholders, and settings of models by their size."""

    note: str
    values: dict[str, Any]
    models: dict[str, str]


class Claims(Entry):
    """The whole of claims.yaml."""

    settings: str
    forms: dict[FormName, Form]
    claims: dict[str, Claim]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check under one condition, every placeholder filled."""

    claim: str
    what: str
    condition: str
    unit: str
    claimed: str
    compare: str
    metric: str | None = None
    divisor: float = 1.0
    runs: tuple[str, ...] = ()
    """Commands, each with ` @ comparison/variant` where it has several rows; the baseline is the last."""
    reason: str | None = None
    """Why there are no runs."""

    def evaluate(self, rounds: Sequence[Sequence[Row] | NotMeasuredError]) -> dict[str, Any]:
        """Return what the rounds show, as a line of the table; a round is the rows of its runs, or why it has none."""
        samples, reasons = [], []
        for rows in rounds:
            try:
                if isinstance(rows, NotMeasuredError):
                    raise rows
                samples.append(float(COMPARISONS[self.compare][1](rows, self.metric)) / self.divisor)
            except NotMeasuredError as reason:
                reasons.append(str(reason))
        return {
            **{name: getattr(self, name) for name in ("claim", "what", "condition", "unit", "claimed")},
            "median": statistics.median(samples) if samples else math.nan,
            "least": min(samples, default=math.nan),
            "greatest": max(samples, default=math.nan),
            "runs": len(samples),
            "verdict": verdict(self.claimed, samples, reasons),
            "commands": "; ".join(self.runs),
        }


def read_claims(file: Path) -> Claims:
    """Return the claims of a YAML file.

    Raises:
        InvalidInputError: the file cannot be read, or an entry is wrong; the message names it.

    """
    try:
        claims = Claims.model_validate(yaml.safe_load(file.read_text()))
    except (OSError, yaml.YAMLError) as error:
        raise InvalidInputError(f"the claims must be a readable YAML file, and {file} is not: {error}") from error
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}, and is {one['input']!r}" for one in error.errors()]
        raise InvalidInputError("\n".join([f"{file} must be as its first lines say; correct", *lines])) from error
    for form, name in itertools.product(claims.forms, claims.claims):
        list(checks_of(claims, name, form, lambda command: ()))
    return claims


def checks_of(claims: Claims, name: str, form: str, predict: Callable[[str], Sequence[Row]]) -> Iterator[Check]:
    """Yield the checks of a claim under every condition; `predict` returns the rows of a `plan` command.

    Raises:
        InvalidInputError: a placeholder has no value, or the form of a claimed range is invalid.

    """
    for measurement in claims.claims[name].measurements:
        try:
            for values in _conditions(measurement, form, claims.forms[form]):
                yield from _checks(name, measurement, values, predict)
        except InvalidInputError as error:
            raise InvalidInputError(f"claim {name}, form {form}: {error}") from error
        except (KeyError, IndexError, ValueError) as error:
            rule = "placeholders and models must have a value"
            raise InvalidInputError(
                f"claim {name}, form {form}: {rule} ({error}); set it in each or in forms"
            ) from error


def _conditions(measurement: Measurement, form_name: str, form: Form) -> Iterator[dict[str, Any]]:
    """Yield the values of the placeholders for each combination."""
    each = {**measurement.each, **measurement.only.get(form_name, {})}
    for combination in itertools.product(*each.values()):
        values = dict(form.values)
        for name, chosen in zip(each, combination, strict=True):
            values |= chosen if isinstance(chosen, Mapping) else {name: str(chosen).format_map(values)}
        yield {**values, "model": form.models[values["size"]]}


def _checks(
    claim: str, measurement: Measurement, values: dict[str, Any], predict: Callable[[str], Sequence[Row]]
) -> Iterator[Check]:
    reason = None
    if measurement.plan is not None:
        where = {name: text.format_map(values) for name, text in measurement.where.items()}
        try:
            values = values | _limits(predict(measurement.plan.format_map(values)), where)
        except NotMeasuredError as error:
            reason, values = str(error), values | {"fits": "?", "exceeds": "?"}
    commands = [
        f"{measurement.command} {run}".strip().format_map(values)
        for run in measurement.runs
        if "{exceeds}" not in run or values["exceeds"] is not None
    ]
    for entry in measurement.checks:
        claimed = entry.claimed.format_map(values)
        range_of(claimed)
        yield Check(
            claim=claim,
            what=entry.what.format_map(values),
            condition=measurement.condition.format_map(values),
            unit=COMPARISONS[entry.compare][0].format_map(values),
            claimed=claimed,
            compare=entry.compare,
            metric=entry.metric,
            divisor=values["gigabyte_mib"] if entry.compare == "gigabytes" else 1.0,
            runs=() if reason else tuple(commands),
            reason=reason,
        )


def _limits(rows: Sequence[Row], where: Mapping[str, str]) -> dict[str, int | None]:
    """Return the largest micro-batch that is predicted to fit (the smallest of all where none is), and the next."""
    chosen = [row for row in rows if all(str(row["choice"][name]) == text for name, text in where.items())]
    fits = {row["micro_batch_size"]: row["fits"] for row in sorted(chosen, key=lambda row: row["micro_batch_size"])}
    sizes = list(fits) or [1]
    last = next((number for number, size in enumerate(fits) if not fits[size]), len(sizes)) - 1
    return {"fits": sizes[max(0, last)], "exceeds": sizes[last + 1] if 0 <= last < len(sizes) - 1 else None}
