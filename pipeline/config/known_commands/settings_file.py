"""`axolotl train FILE` and `llamafactory-cli train FILE`, whose settings are keys of the file."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pipeline.config.known_command import KnownCommand

PROGRAMS = ("axolotl", "llamafactory-cli")


class SettingsFile(KnownCommand):
    """The command lines of axolotl and LLaMA-Factory."""

    settings_file: ClassVar[int | None] = 2

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether it is `train` of such a program, with a file."""
        return len(words) > 2 and Path(words[0]).name in PROGRAMS and words[1] == "train"
