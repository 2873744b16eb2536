"""Requirements: every check yields all the reasons against a kernel, never a bare bool."""

from kernelreg.requirements.call import call_reasons
from kernelreg.requirements.condition import holds, known_bad_reasons
from kernelreg.requirements.machine import machine_reasons

__all__ = ["call_reasons", "holds", "known_bad_reasons", "machine_reasons"]
