"""Compute capability rules: exact, family, range and alternatives are different rules.

``==12.0`` is exact (12.1 is refused, FLA #1094), ``==10.*`` is a family, ``>=8.0`` a range, ``||`` joins alternatives.
"""

from __future__ import annotations

import re

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernelreg.errors import DescriptorError
from kernelreg.versions import check_length, parse_range

_CAPABILITY = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
_OPERAND = re.compile(r"[0-9]{1,3}\.([0-9]{1,3}|\*)")


def parse_capabilities(text: str) -> tuple[SpecifierSet, ...]:
    """The alternatives that ``text`` writes.

    Raises:
        DescriptorError: too long, an alternative is empty, or compares with something that is not MAJOR.MINOR.
    """
    check_length(text)
    alternatives = tuple(parse_range(part) for part in text.split("||"))
    for specifiers in alternatives:
        for specifier in specifiers:
            if not _OPERAND.fullmatch(specifier.version):
                raise DescriptorError(
                    f"{text!r} compares with {specifier.version!r}, which is no compute capability; "
                    'accepted: "==9.0" (exact), "==10.*" (family), ">=8.0" (range), "||" between alternatives'
                )
    return alternatives


def is_capability(text: str) -> bool:
    """Whether the text is a compute capability such as ``"9.0"``."""
    return _CAPABILITY.fullmatch(text) is not None


def matches_capability(capability: str, text: str) -> bool | None:
    """Whether a capability such as ``"9.0"`` fits one of the alternatives in ``text``; None when it is none."""
    if not is_capability(capability):
        return None
    return any(specifiers.contains(Version(capability), prereleases=True) for specifiers in parse_capabilities(text))
