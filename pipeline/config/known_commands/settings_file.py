"""`axolotl train FILE` and `llamafactory-cli train FILE`, whose settings are keys of the file."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.config.known_command import KnownCommand
from pipeline.config.patched_file import FORMATS, YAML

PROGRAMS = ("axolotl", "llamafactory-cli")


class SettingsFile(KnownCommand):
    """The command lines of axolotl and LLaMA-Factory."""

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether it is `train` of such a program, with a file."""
        return len(words) > 2 and Path(words[0]).name in PROGRAMS and words[1] == "train"

    @classmethod
    def settings_file(cls, words: Sequence[str]) -> str | None:
        """Return the first word that can be such a file, which options with values may precede; YAML before others."""
        files = [word for word in words[2:] if word.endswith(FORMATS) and not word.startswith("-")]
        return min(files, key=lambda word: not word.endswith(YAML), default=words[2])
