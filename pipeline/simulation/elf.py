"""The symbol tables of shared libraries of 64-bit machines."""

import struct
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

SYMBOL = "<IBBHQQ"
"""An entry of a table of symbols: name, binding and type, visibility, section, value, size."""
LOCAL, WEAK = 0, 2
UNDEFINED = 0


@dataclass(frozen=True)
class SharedLibrary:
    """What a shared library is linked to, asks for and defines."""

    needed: frozenset[str]
    """Names of the libraries that it is linked to."""
    versions: frozenset[tuple[str, str]]
    """Names of libraries, each with a version of symbols that is asked of it."""
    asked: frozenset[str]
    """Symbols that others must define."""
    defined: frozenset[str]


NOTHING = SharedLibrary(frozenset(), frozenset(), frozenset(), frozenset())


def read_library(file: Path) -> SharedLibrary:
    """Return the symbols of a file; none if it is no shared library."""
    try:
        with file.open("rb") as stream:
            elf = ELFFile(stream)
            return SharedLibrary(_needed(elf), _versions(elf), *_symbols(elf))
    except (ELFError, OSError):
        return NOTHING


def _needed(elf: ELFFile) -> frozenset[str]:
    dynamic = elf.get_section_by_name(".dynamic")
    if not isinstance(dynamic, DynamicSection):
        return frozenset()
    return frozenset(str(tag.needed) for tag in dynamic.iter_tags("DT_NEEDED"))  # type: ignore[attr-defined]


def _versions(elf: ELFFile) -> frozenset[tuple[str, str]]:
    section = elf.get_section_by_name(".gnu.version_r")
    if not isinstance(section, GNUVerNeedSection):
        return frozenset()
    return frozenset((str(library.name), one.name) for library, ones in section.iter_versions() for one in ones)


def _symbols(elf: ELFFile) -> tuple[frozenset[str], frozenset[str]]:
    """Return the symbols that are asked for, without those that the library can do without, and those defined."""
    table, names = (elf.get_section_by_name(name) for name in (".dynsym", ".dynstr"))
    if table is None or names is None:
        return frozenset(), frozenset()
    text = names.data()
    asked, defined = set[str](), set[str]()
    for at, info, _, section, _, _ in struct.iter_unpack(SYMBOL, table.data()):
        binding = info >> 4
        if binding == LOCAL or (section == UNDEFINED and binding == WEAK):
            continue
        (asked if section == UNDEFINED else defined).add(text[at : text.index(b"\0", at)].decode())
    return frozenset(asked), frozenset(defined)
