"""Head shapes of models with Gated Delta Net layers, each with its source, and how devices share them."""

from __future__ import annotations

import msgspec

from kernelreg.errors import ConfigurationError, unknown_name

_QWEN3_NEXT = (
    "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/qwen3_next/"
    "configuration_qwen3_next.py (the defaults are this model's)"
)
_QWEN3_5 = "https://github.com/tile-ai/TileOPs/issues/1581 (from the text_config of each published config.json)"


class Shape(msgspec.Struct, frozen=True):
    """The heads of a layer, or of a device's share of it.

    Attributes:
        heads, value_heads: H and HV.
        head_dim_k, head_dim_v: K and V.
    """

    heads: int
    value_heads: int
    head_dim_k: int = 128
    head_dim_v: int = 128

    def split(self, tp: int) -> Shape:
        """One device's share, where so many share the heads.

        Raises:
            ConfigurationError: they cannot be shared evenly; names what can.
        """
        if tp < 1 or self.heads % tp or self.value_heads % tp:
            fits = [
                str(each) for each in range(1, self.heads + 1) if not (self.heads % each or self.value_heads % each)
            ]
            raise ConfigurationError(f"--tp {tp}: {self} cannot be shared evenly; accepted: {', '.join(fits)}")
        return Shape(self.heads // tp, self.value_heads // tp, self.head_dim_k, self.head_dim_v)

    def __str__(self) -> str:
        sizes = (
            f"{self.head_dim_k}" if self.head_dim_k == self.head_dim_v else f"{self.head_dim_k} and {self.head_dim_v}"
        )
        return f"{self.heads} and {self.value_heads} heads of {sizes}"


class Model(msgspec.Struct, frozen=True):
    """A model's layer, and where its numbers are from."""

    shape: Shape
    source: str


MODELS = {
    "qwen3-next-80b-a3b": Model(Shape(16, 32), _QWEN3_NEXT),
    "qwen3.5-0.8b": Model(Shape(16, 16), _QWEN3_5),
    "qwen3.5-2b": Model(Shape(16, 16), _QWEN3_5),
    "qwen3.5-4b": Model(Shape(16, 32), _QWEN3_5),
    "qwen3.5-9b": Model(Shape(16, 32), _QWEN3_5),
    "qwen3.5-27b": Model(Shape(16, 48), _QWEN3_5),
    "qwen3.5-35b-a3b": Model(Shape(16, 32), _QWEN3_5),
    "qwen3.5-122b-a10b": Model(Shape(16, 64), _QWEN3_5),
    "qwen3.5-397b-a17b": Model(Shape(16, 64), _QWEN3_5),
}


def model_named(name: str) -> Model:
    """The model of that name, however its letters are written.

    Raises:
        ConfigurationError: there is none; names the nearest.
    """
    found = MODELS.get(name.lower().replace("_", "-"))
    if found is None:
        raise ConfigurationError(unknown_name("model", name, MODELS))
    return found
