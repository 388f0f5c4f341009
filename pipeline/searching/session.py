"""What a search stores with its study, so that workers of other processes and machines can join it."""

import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.runtime.environment import versions, why_other_versions
from pipeline.searching.problem import Problem
from pipeline.searching.storage import open_storage, reachable, refuse_missing_file

SESSION = "session"
"""Attribute of a study: the latest search that runs its trials."""
OF_A_MACHINE = ("output", "workers", "executor", "ray_address")
"""Settings that each worker has of its own."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A search that other workers can join."""

    settings: Mapping[str, Any]
    """All settings that describe the search, as JSON values."""
    versions: Mapping[str, str]
    """Of Python and of packages, and a digest of Fitproof's code."""
    host: str
    run_id: str | None
    """MLflow's id of the run below which the trials are."""
    tracking_uri: str
    """MLflow's store, without a password."""
    ends_at: float | None
    """When no further trial is to start, in seconds since 1970; None: there is no limit."""

    @property
    def deadline(self) -> float:
        """When no further trial is to start, in seconds of time.monotonic() of this machine."""
        return math.inf if self.ends_at is None else time.monotonic() + self.ends_at - time.time()


def session_of(problem: Problem, study_name: str, run_id: str | None, tracking_uri: str) -> Session:
    """Return the session of a search that begins on this machine."""
    settings = {**problem.settings_for_workers, "study": study_name}
    limit = problem.settings.search_time_limit
    return Session(
        settings={name: value for name, value in settings.items() if name not in OF_A_MACHINE},
        versions=versions(),
        host=socket.gethostname(),
        run_id=run_id,
        tracking_uri=tracking_uri,
        ends_at=None if limit is None else time.time() + limit,
    )


def read_session(storage: str, name: str) -> Session:
    """Return the session of a study.

    Raises:
        InvalidInputError: the storage cannot be reached, has no such study, or no search has run its trials; this
            machine has other versions, or cannot share the files of the search.

    """
    with reachable(storage, Exception):
        refuse_missing_file(storage)
        studies = {study.study_name: study for study in open_storage(storage).get_all_studies()}
    if name not in studies:
        known = ", ".join(sorted(studies)) or "none"
        raise InvalidInputError(f"no study is called {name!r} in this storage; the studies are {known}")
    stored = studies[name].user_attrs.get(SESSION)
    if stored is None:
        raise InvalidInputError(f"a worker joins a search, and none has begun the study {name!r}; start it first")
    if reason := why_other_versions(stored["versions"]):
        raise InvalidInputError(reason)
    session = Session(**stored)
    _refuse_files_of_another_machine(storage, session)
    return session


def _refuse_files_of_another_machine(storage: str, session: Session) -> None:
    if session.host == socket.gethostname():
        return
    stores = {"storage": storage, "MLflow's store": session.tracking_uri}
    for name, uri in stores.items():
        if uri.startswith(("sqlite", "file:", "/")):
            raise InvalidInputError(
                f"workers on several machines need servers that all of them reach, and {name} of the search on "
                f"{session.host} is a file ({uri}); use PostgreSQL and an MLflow server, see docs/scaling.md"
            )
