"""The files of a corpus: a file, several of one pattern, or a folder, which may be a dataset's repository."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.by_key import grouped
from pipeline.base.errors import InvalidInputError
from pipeline.data._support.rows import READERS, Row, kind_of, rows_of

SPLITS: Mapping[str, frozenset[str]] = {
    "train": frozenset({"train", "training"}),
    "validation": frozenset({"validation", "valid", "val", "dev"}),
    "test": frozenset({"test", "testing", "eval", "evaluation"}),
}
"""Words in names of files and folders that say which split of a dataset they are of, as the package datasets has."""
ABOUT_DATA = frozenset({"dataset_info", "dataset_infos", "dataset_dict", "state", "package", "readme", "license"})
"""Files beside those of rows that have none, by their names without suffixes."""
CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files to read, in their order."""

    files: tuple[Path, ...]
    ignored: tuple[Path, ...] = ()
    """Of the same folder, but not read."""

    def rows(self, path: Path, count: Callable[[int], None]) -> Iterator[tuple[str, Row]]:
        """Yield the rows of one of them, each with its place, which names the file where there are several."""
        for place, row in rows_of(path, count):
            yield place if len(self.files) == 1 else f"{path.name}, {place}", row

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def note(self) -> str | None:
        """A sentence about what is not read; None if all is."""
        if not self.ignored:
            return None
        kinds = Counter(kind_of(path) or path.name for path in self.ignored)
        names = ", ".join(path.name for path in self.ignored[:3]) + (", ..." if len(self.ignored) > 3 else "")
        kept = f"{len(self.files)} file{'s' if len(self.files) > 1 else ''}"
        return (
            f"{kept} of the folder {'are' if len(self.files) > 1 else 'is'} read, and not {names} ({_counted(kinds)})"
        )


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def find_data_files(
    path: Path, setting: str, kinds: Collection[str], config: str | None = None, split: str = "train"
) -> DataFiles:
    """Return the files that a setting names: `path`, those that it is a pattern of, or those of a folder.

    Of a folder that has files of several splits, those of `split` are read. One that is a dataset's repository may say
    in its README.md which files each of its configurations has.

    Raises:
        InvalidInputError: there is none, or none that can be read.

    """
    path = path.expanduser()
    if path.is_dir():
        return _of_folder(path, setting, kinds, config, split)
    found = tuple(sorted(path.parent.glob(path.name))) if not path.exists() and "*" in path.name else (path,)
    listed = ", ".join(kinds)
    if not found or not all(file.exists() for file in found):
        remote = " (data of a network have to be downloaded first)" if re.match(r"\w+:/", str(path)) else ""
        raise InvalidInputError(f"{setting} must exist, and {path} does not{remote}; name another file or folder")
    for file in found:
        if kind_of(file) not in kinds:
            raise InvalidInputError(
                f"{setting} reads {listed} (also with .gz, .bz2 or .xz), and {file} is none of them; rename "
                "or convert it"
            )
    return DataFiles(files=found)


def _of_folder(folder: Path, setting: str, kinds: Collection[str], config: str | None, split: str) -> DataFiles:
    everything = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    files = [file for file in everything if kind_of(file) in kinds]
    if any(kind_of(file) in READERS for file in files) or _is_card(folder / CARD):
        files = [file for file in files if file.name.partition(".")[0].lower() not in ABOUT_DATA]
    if not files:
        raise InvalidInputError(
            f"{setting} reads {', '.join(kinds)}, and {folder} has none of them; name another folder"
        )
    declared = _declared(folder, setting, config, split)
    chosen = [file for file in files if file in declared] or _of_split(files, folder, setting, split)
    return DataFiles(files=tuple(chosen), ignored=tuple(file for file in everything if file not in {*chosen}))


def _of_split(files: Sequence[Path], folder: Path, setting: str, split: str) -> Sequence[Path]:
    """Return the files whose names say that they are of `split` or, for train, those that are of no split."""
    by_split = grouped((split_of(file.relative_to(folder)), file) for file in files)
    has_rows = any(kind_of(file) in READERS for file in files)
    if not has_rows and not {"train", "test"} <= {*by_split}:  # documents whose names have such words
        return files
    chosen = by_split.get(split) or (by_split.get(None) if split == "train" else None)
    if not chosen:
        raise InvalidInputError(
            f"{setting} must have a split {split}, and {folder} has {', '.join(filter(None, by_split)) or 'none'}; "
            "name a file of it, or another folder"
        )
    return chosen


def split_of(path: Path) -> str | None:
    """Return the split that a path below a dataset's folder names, if any."""
    for part in path.parts:
        words = re.split(r"[^a-z]+", part.lower())
        for split, known in SPLITS.items():
            if known & {*words}:
                return split
    return None


def _is_card(path: Path) -> bool:
    """Whether a file is the card of a dataset: it begins with lines of YAML."""
    try:
        with path.open("rb") as file:
            return file.read(4).startswith(b"---")
    except OSError:
        return False


def _declared(folder: Path, setting: str, config: str | None, split: str) -> frozenset[Path]:
    """Return the files that the card of a dataset's repository has for a configuration and a split, if it names any."""
    configs = _configs(folder / CARD)
    names = [str(each.get("config_name", "default")) for each in configs]
    if config is None:
        default = [each for each, name in zip(configs, names, strict=True) if each.get("default") or name == "default"]
        chosen = default[:1] or (configs if len(configs) == 1 else [])
    else:
        chosen = [each for each, name in zip(configs, names, strict=True) if name == config]
    if not chosen and (configs or config is not None):
        raise InvalidInputError(
            f"the dataset in {folder} has the configurations {', '.join(names) or 'none'}, and "
            f"{setting.partition('.')[0]}.config is {config or 'none'}; set it to one of them, or name a file"
        )
    patterns = [pattern for each in chosen for pattern in _patterns(each.get("data_files"), split)]
    return frozenset(file for pattern in patterns for file in folder.glob(pattern.removeprefix("./")))


def _configs(card: Path) -> list[Mapping[str, Any]]:
    """Return the configurations that the card of a dataset has, with their files."""
    if not _is_card(card):
        return []
    from huggingface_hub.repocard import metadata_load

    try:
        configs = (metadata_load(card) or {}).get("configs") or []
    except Exception:  # a card that is no YAML: what is read is decided by names alone
        return []
    return [each for each in configs if isinstance(each, Mapping) and each.get("data_files")]


def _patterns(data_files: Any, split: str) -> list[str]:
    """Return the patterns of a split: data_files is a pattern, several, or these for each split."""
    if isinstance(data_files, str):
        return [data_files] if split == "train" else []
    if isinstance(data_files, Mapping):
        data_files = [{"split": name, "path": path} for name, path in data_files.items()]
    found: list[str] = []
    for each in data_files if isinstance(data_files, list) else []:
        if isinstance(each, str):
            found += [each] if split == "train" else []
        elif isinstance(each, Mapping) and str(each.get("split", "train")) == split:
            path = each.get("path")
            found += [path] if isinstance(path, str) else [str(one) for one in path or ()]
    return found
