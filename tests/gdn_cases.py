"""What the tests share of GDN calls: their tensors, and bounds for kernels that compute in float32 throughout."""

from __future__ import annotations

import torch

from kernelreg.verify.inputs import Arguments as Call
from kernelreg.verify.inputs import gdn_call, leaves, pool_call
from kernelreg.verify.judge import expected, relative

__all__ = ["EXACT", "Call", "expected", "gdn_call", "leaves", "pool_call", "relative"]

#: Bounds on ‖out − ref‖ / ‖ref‖ for a kernel that rounds once, on the way out.
EXACT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5, torch.float64: 1e-10}
