"""How far a GDN kernel may be from the float64 recurrence on the same inputs, by dtype of q, k and v.

An error is ``‖out − ref‖ / ‖ref‖``. One rounding to a unit roundoff u changes a tensor by about 0.43·u in this norm,
and n independent ones by √n times that. A chunked kernel rounds seven tensors to the dtype of its inputs on the way
(decayed keys and queries, the attention matrix, the system's inverse, corrected values, states, the output): 1.1·u. The
bound is twice that and a little, 2.5·u. A gradient takes the way twice: 5·u.
"""

from __future__ import annotations

import msgspec


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on ``‖out − ref‖ / ‖ref‖``.

    Attributes:
        forward: of the output and of the states.
        backward: of the gradient of each input that has no bound of its own.
        because: why these.
        own: gradients with a bound of their own, by the input's name.
    """

    forward: float
    backward: float
    because: str
    own: dict[str, float] = {}

    def gradient(self, name: str) -> float:
        """The bound on the gradient of that input."""
        return self.own.get(name, self.backward)


#: By how much one token's vector, or one head's state, may be farther off than the whole tensor. The roundings of one
#: part add up to more or less than the average; docs/evidence has the largest that a right kernel showed.
ONE_PART = 4.0
_BFLOAT16, _FLOAT16, _TF32 = 2.0**-8, 2.0**-11, 2.0**-11  # unit roundoffs: 8, 11 and 11 digits
#: The gradient of a key is a small difference of large terms: FLA and FlashQLA, which share no code, lose the same
#: twelve to fifteen roundoffs to it (docs/evidence).
_KEYS = 20

GDN_TOLERANCES = {
    "bfloat16": Tolerance(
        forward=2.5 * _BFLOAT16,
        backward=5 * _BFLOAT16,
        own={"k": _KEYS * _BFLOAT16},
        because="2.5 unit roundoffs of 2^-8",
    ),
    "float16": Tolerance(
        forward=2.5 * _FLOAT16,
        backward=5 * _FLOAT16,
        own={"k": _KEYS * _FLOAT16},
        because="2.5 unit roundoffs of 2^-11",
    ),
    # Both factors of a dozen products may be cut (not rounded) to TF32's 11 digits: 0.87·u each.
    "float32": Tolerance(
        forward=8 * _TF32,
        backward=16 * _TF32,
        own={"k": 2 * _KEYS * _TF32},
        because="TF32 products: 8 unit roundoffs of 2^-11",
    ),
    "float64": Tolerance(
        forward=1e-10,
        backward=1e-10,
        because="sums over up to 10^5 tokens, with a unit roundoff of 2^-53 each",
    ),
}
