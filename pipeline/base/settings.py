"""What all settings have in common: how they are read, and that they are frozen; it does not load torch."""

from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

RESULTS = Path("runs")
"""The default folder of the results on local disk."""


class Settings(BaseModel):
    """Frozen settings; unknown names are refused, and the docstring of a field is its description in `--help`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_written(cls, value: object, info: ValidationInfo) -> object:
        """Parse the text `none` as None where the type allows it; reject bools for other types."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if value == "none" and type(None) in get_args(annotation):
            return None
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("must not be true or false")
        return value
