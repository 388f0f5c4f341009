"""A search after its look ahead: the trials, the check of the fastest, and the report, all kept as they come."""

import json
from functools import partial

from rich.console import Console

from pipeline.base.units import MIB
from pipeline.runtime.environment import environment
from pipeline.runtime.signals import stop_in_order
from pipeline.searching.answer import report
from pipeline.searching.problem import SearchProblem
from pipeline.searching.proposals import make_proposer
from pipeline.searching.results import SearchFindings
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.study import StoredStudy
from pipeline.searching.trials import rows_of, run_trials
from pipeline.searching.verification import verify
from pipeline.tracking.parent import open_parent

DIRECTIONS = {"throughput": ("maximize",), "pareto": ("maximize", "minimize")}


def conduct(plan: SearchProblem, sampler: PredictiveSampler | None, console: Console) -> SearchFindings | None:
    """Measure, check and report; return what was found, None where nothing was measured.

    Raises:
        InvalidInputError: a storage cannot be reached, or its study measured under other conditions.

    """
    stop_in_order()
    study = StoredStudy(plan.settings.storage, plan.settings.study, DIRECTIONS[plan.settings.objectives], plan.identity)
    proposer = make_proposer(plan, study, sampler)
    subject = f"{plan.base.settings.model} in {plan.budget_bytes / MIB:,.0f} MiB"
    with open_parent("search", subject, plan.base.settings.output) as parent, study.must_answer():
        parent.params({**plan.base.params(), **plan.settings.model_dump(mode="json")})
        parent.tags({"device": str(plan.base.device), "study": study.name})
        parent.file("environment.json", json.dumps(environment(plan.base.device), indent=1))
        findings, verification = None, None
        try:
            run_trials(plan, study, proposer, parent, console)
            rows = rows_of(plan, study)
            if plan.settings.verify_steps:
                say = partial(console.print, style="dim", highlight=False)
                verification = verify(plan, rows, proposer.naive(rows), parent, say)
        finally:
            findings = report(plan, study, proposer, verification, parent, console)
            parent.succeeded = findings is not None and findings.best is not None
    return findings
