"""`axolotl train FILE` and `llamafactory-cli train FILE`, whose settings are keys of the file."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.config.known_command import KnownCommand
from pipeline.config.patched_file import FORMATS

PROGRAMS = ("axolotl", "llamafactory-cli")


class SettingsFile(KnownCommand):
    """The command lines of axolotl and LLaMA-Factory."""

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether it is `train` of such a program, with a file."""
        return len(words) > 2 and Path(words[0]).name in PROGRAMS and words[1] == "train"

    @classmethod
    def settings_file(cls, words: Sequence[str]) -> str | None:
        """Return the first word that can be such a file, which may follow options."""
        return next((word for word in words[2:] if word.endswith(FORMATS)), words[2])
