"""`axolotl train FILE`, whose settings are keys of the file."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pipeline.config.known_command import KnownCommand


class Axolotl(KnownCommand):
    """axolotl's command line."""

    settings_file: ClassVar[int | None] = 2

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether it is `axolotl train` with a file."""
        return len(words) > 2 and Path(words[0]).name == "axolotl" and words[1] == "train"
