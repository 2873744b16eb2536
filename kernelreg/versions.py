"""Version ranges: PEP 440 specifier sets, read and evaluated with ``packaging``.

Builds of torch, CUDA, HIP, triton and the driver compare by their release number, because a pre-release,
nightly or vendor build of 2.8 has 2.8's interfaces (TransformerEngine #1277, composer #3161). Python packages
compare as PEP 440 says, pre-releases allowed. Local parts (``+cu128``) never decide (TransformerEngine #3334).
"""

from __future__ import annotations

import re

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

#: Distributions whose builds compare by release number wherever they are named.
BUILDS = frozenset({"torch", "triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"})

#: ``torch.version.hip`` carries the commit of its compiler behind a dash, which PEP 440 does not read.
_HIP_COMMIT = re.compile(r"^(\d+(?:\.\d+)*)-[0-9a-f]+$")


def parse_version(raw: str) -> Version | None:
    """The version, or None when the text is not one (never an exception)."""
    try:
        return Version(_HIP_COMMIT.sub(r"\1", raw.strip()))
    except (InvalidVersion, ValueError):  # ValueError: more digits than Python turns into an int
        return None


def parse_range(text: str) -> SpecifierSet:
    """The specifier set that ``text`` writes; ``*`` is any version.

    Raises:
        ValueError: the text is not a specifier set, or names a local part, which never decides.
    """
    if text.strip() == "*":
        return SpecifierSet()
    if not text.strip():
        raise ValueError('an empty version range; accepted: "*" for any, or PEP 440 such as ">=2.8,<3"')
    try:
        specifiers = SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f'{error}; accepted: "*" for any, or PEP 440 such as ">=2.8,<3"') from None
    for specifier in specifiers:
        if parse_version(specifier.version.removesuffix(".*")) is None:  # packaging reads it only when it compares
            raise ValueError(f"{text[:80]!r} compares with what is no version")
        if specifier.operator == "===":
            raise ValueError(f"{text!r} compares text with '==='; accepted: ==, !=, <=, >=, <, >, ~=")
        if "+" in specifier.version:
            raise ValueError(f"{text!r} names a local part ({specifier.version}), which never decides")
    return specifiers


def satisfies(raw: str, text: str, *, by_release: bool) -> bool | None:
    """Whether the version ``raw`` lies in the range ``text``; None when ``raw`` cannot be read."""
    version = parse_version(raw)
    if version is None:
        return None
    comparable = Version(version.base_version if by_release else version.public)
    return parse_range(text).contains(comparable, prereleases=True)
