"""Version ranges: PEP 440 specifier sets, read and evaluated with ``packaging``.

Builds of torch, CUDA, HIP, triton and the driver compare by their release number, because a pre-release,
nightly or vendor build of 2.8 has 2.8's interfaces (TransformerEngine #1277, composer #3161). Python packages
compare as PEP 440 says, pre-releases allowed. Local parts (``+cu128``) never decide (TransformerEngine #3334).
"""

from __future__ import annotations

import re

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from kernelreg.errors import DescriptorError

#: Distributions whose builds compare by release number wherever they are named.
BUILDS = frozenset({"torch", "triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"})

#: Characters of a version or a range: a limit for texts that nobody wrote by hand, which take seconds to compare.
_LONGEST = 1000

#: ``torch.version.hip`` carries the commit of its compiler behind a dash, which PEP 440 does not read.
_HIP_COMMIT = re.compile(r"^(\d+(?:\.\d+)*)-[0-9a-f]+$")


def parse_version(raw: str) -> Version | None:
    """The version, or None when the text is not one (never an exception)."""
    if len(raw) > _LONGEST:
        return None
    try:
        return Version(_HIP_COMMIT.sub(r"\1", raw.strip()))
    except (InvalidVersion, ValueError):  # ValueError: more digits than Python turns into an int
        return None


def check_length(text: str) -> None:
    """Refuse a rule that is longer than any that a person writes.

    Raises:
        DescriptorError: it is.
    """
    if len(text) > _LONGEST:
        raise DescriptorError(f"{text[:80]!r} … ({len(text)} characters); accepted: at most {_LONGEST}")


def parse_range(text: str) -> SpecifierSet:
    """The specifier set that ``text`` writes; ``*`` is any version.

    Raises:
        DescriptorError: the text is not a specifier set, or names a local part, which never decides.
    """
    check_length(text)
    if text.strip() == "*":
        return SpecifierSet()
    if not text.strip():
        raise DescriptorError('an empty version range; accepted: "*" for any, or PEP 440 such as ">=2.8,<3"')
    try:
        specifiers = SpecifierSet(text)
    except InvalidSpecifier as error:
        raise DescriptorError(f'{error}; accepted: "*" for any, or PEP 440 such as ">=2.8,<3"') from None
    for specifier in specifiers:
        if parse_version(specifier.version.removesuffix(".*")) is None:  # packaging reads it only when it compares
            raise DescriptorError(f"{text[:80]!r} compares with what is no version")
        if specifier.operator == "===":
            raise DescriptorError(f"{text!r} compares text with '==='; accepted: ==, !=, <=, >=, <, >, ~=")
        if "+" in specifier.version:
            raise DescriptorError(f"{text!r} names a local part ({specifier.version}), which never decides")
    return specifiers


def satisfies(raw: str, text: str, *, by_release: bool) -> bool | None:
    """Whether the version ``raw`` lies in the range ``text``; None when ``raw`` cannot be read."""
    version = parse_version(raw)
    if version is None:
        return None
    comparable = Version(version.base_version if by_release else version.public)
    return parse_range(text).contains(comparable, prereleases=True)
