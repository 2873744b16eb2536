"""Run as a script: detect machine after machine, told on standard input, and print the facts of all as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from kernelreg.machine import cuda_driver, detect, nvml


def main(file: Path) -> list[object]:
    """Detect each; what one changes of environment, import path and limits is put back for the next."""
    found: list[object] = []
    environ, path, executable = dict(os.environ), list(sys.path), sys.executable
    for each in json.load(sys.stdin):
        file.write_text(each.get("machine", "") + "\n", encoding="utf-8")
        os.environ.clear()
        os.environ.update({**environ, "STUB_MACHINE": str(file), **each.get("environ", {})})
        hidden = each.get("hide", "")
        kept = [folder for folder in path if not (hidden and Path(folder, hidden).exists())]
        sys.path[:] = [*each.get("path", []), *kept]
        sys.executable = each.get("interpreter", executable)
        importlib.invalidate_caches()
        limits = each.get("limits", {})
        nvml.NVML_SECONDS, cuda_driver.DRIVER_SECONDS = limits.get("nvml", 60.0), limits.get("cuda", 60.0)
        found.append(detect([]).to_dict())
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))  # noqa: T201
