"""What a machine is, as plain data that can be saved, loaded and compared."""

from __future__ import annotations

import hashlib
import os
from typing import Annotated, Any, Literal

import msgspec

from kernelreg.decoding import read_json
from kernelreg.errors import ConfigurationError, FactsError, path_of
from kernelreg.writing import write_whole

Index = Annotated[int, msgspec.Meta(ge=0)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Platform(_Record, frozen=True, kw_only=True):
    """Operating system and interpreter."""

    system: str
    machine: str
    python: str
    implementation: str


class TorchBuild(_Record, frozen=True, kw_only=True):
    """The torch that ``import torch`` would give; ``cuda`` and ``hip`` as in ``torch.version``.

    An empty text is what could not be read: of a torch that is installed, but whose files do not say.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None

    @property
    def build_name(self) -> str:
        """What the build is for, in a word: ``CUDA 12.8``, ``ROCm 6.4.43482-0f2d60242``, ``CPU only`` …"""
        if self.cuda or self.hip:
            return f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}"
        if "" in (self.cuda, self.hip):
            return "build unknown"
        # A label, which decides nothing: builds without one may have MPS, or an extension for another device.
        return {"cpu": "CPU only", "xpu": "XPU"}.get(self.version.partition("+")[2], "neither CUDA nor ROCm")


class Driver(_Record, frozen=True, kw_only=True):
    """The GPU driver; ``cuda`` is the newest CUDA version that it can run."""

    version: str | None = None
    cuda: str | None = None


class Device(_Record, frozen=True, kw_only=True):
    """One visible device. ``index`` is the one that CUDA (or HIP, as torch names it) will number it by.

    Attributes:
        type: ``cuda``, ``rocm``, ``xpu``, ``mps``, ``cpu`` …
        compute_capability: ``"9.0"``; on ROCm what torch reports, which is not an NVIDIA capability.
        memory_bytes: total device memory in bytes.
        mig: the device is a MIG instance; its ``uuid`` and memory are the instance's.
    """

    index: Index
    type: str
    vendor: str | None = None
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    compute_capability: str | None = None
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    mig: bool = False

    @property
    def torch_name(self) -> str:
        """The device as torch names it: ``cuda:0`` also where the facts say ``rocm``."""
        if self.type == "cpu":
            return "cpu"
        return f"{'cuda' if self.type == 'rocm' else self.type}:{self.index}"

    @property
    def description(self) -> str:
        """The device in one line, without what tells it from its like."""
        parts = [self.name or self.type]
        if self.compute_capability:
            parts.append(f"compute capability {self.compute_capability}")
        if self.memory_bytes:
            parts.append(f"{self.memory_bytes / 2**30:.0f} GiB")
        if self.mig:
            parts.append("MIG instance")
        return ", ".join(parts)


CPU = Device(index=0, type="cpu")
#: What every machine has, whether or not its facts list it, by torch's name.
_EVERYWHERE = {"cpu": CPU, "meta": Device(index=0, type="meta")}


class Tool(_Record, frozen=True, kw_only=True):
    """A program that kernels use when they compile."""

    path: str
    version: str | None = None


class Problem(_Record, frozen=True, kw_only=True):
    """A source of facts, or a setting, that failed, and how."""

    source: str
    error: str


class Facts(_Record, frozen=True, kw_only=True):
    """Everything that decides which kernel can run on a machine, and nothing else."""

    schema: Literal[1] = 1
    platform: Platform
    torch: TorchBuild | None = None
    driver: Driver | None = None
    devices: tuple[Device, ...] = ()
    tools: dict[str, Tool] = {}
    packages: dict[str, str] = {}
    environment: dict[str, str] = {}
    problems: tuple[Problem, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for device in self.devices:
            if device.torch_name in seen:
                raise ValueError(f"devices: two of them are {device.torch_name}; an index names one device of a type")
            seen.add(device.torch_name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Facts:
        """Read a facts file.

        Raises:
            FactsError: unreadable, not JSON, an unknown or missing key, an index that two devices have; names the
                file and the key.
            ConfigurationError: ``path`` is no path.
        """
        return read_json(path_of("Facts.load", path), cls, FactsError)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a facts file, whole or not at all.

        Raises:
            FactsError: the file cannot be written; names it and the cause.
            ConfigurationError: ``path`` is no path.
        """
        write_whole(path_of("Facts.save", path), self.to_json() + "\n", FactsError)

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain data, as in a facts file."""
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return data

    def to_json(self) -> str:
        """The text of a facts file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @property
    def fingerprint(self) -> str:
        """16 hex digits over all that decides: problems and environment are how it was found, not what it is."""
        deciding = msgspec.structs.replace(self, problems=(), environment={})
        return hashlib.sha256(msgspec.json.encode(deciding, order="sorted")).hexdigest()[:16]

    def device(self, name: str) -> Device | None:
        """The visible device that torch would call ``name`` (``cuda`` is ``cuda:0``), or None.

        Raises:
            ConfigurationError: ``name`` is no text.
        """
        if not isinstance(name, str):
            raise ConfigurationError(f"device({name!r:.100}); accepted: a device's name, such as 'cuda:0'")
        if name in _EVERYWHERE:
            return _EVERYWHERE[name]
        wanted = name if ":" in name else f"{name}:0"
        return next((device for device in self.devices if device.torch_name == wanted), None)
