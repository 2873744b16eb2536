"""The JSON Schema of ``backend.toml``, made from the types that read it."""

from __future__ import annotations

import msgspec

from kernelreg.descriptor import Descriptor


def descriptor_schema() -> str:
    """The schema as indented JSON text."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Descriptor)}
    return msgspec.json.format(msgspec.json.encode(schema, order="deterministic"), indent=2).decode()
