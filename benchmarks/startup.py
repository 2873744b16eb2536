"""What starting costs: `import kernelreg` beside a bare interpreter, `kernelreg doctor` beside torch's collect_env.

    python benchmarks/startup.py

Every command runs in turn, several rounds, in processes of this interpreter; medians and ranges are printed.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

ROUNDS = 9
COMMANDS = {
    "bare interpreter": ["-c", "pass"],
    "import kernelreg": ["-c", "import kernelreg"],
    "import kernelreg, then resolve's modules": ["-c", "import kernelreg; kernelreg.resolve"],
    "kernelreg doctor": ["-m", "kernelreg", "doctor"],
    "torch.utils.collect_env": ["-m", "torch.utils.collect_env"],
}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for arguments in COMMANDS.values():  # the first run of each fills the disk's cache
        seconds(arguments)
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    middle = {name: statistics.median(each) for name, each in times.items()}
    packages = ", ".join(f"{name} {version(name)}" for name in ("kernelreg", "torch"))
    print(f"{datetime.date.today().isoformat()}, python benchmarks/startup.py, {ROUNDS} rounds")
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, Python {platform.python_version()}, {packages}")
    for name, each in times.items():
        print(f"{name:42}{middle[name] * 1e3:8.0f} ms  ({min(each) * 1e3:.0f} to {max(each) * 1e3:.0f})")
    more = (middle["import kernelreg"] - middle["bare interpreter"]) * 1e3
    ratio = middle["torch.utils.collect_env"] / middle["kernelreg doctor"]
    print(f"import kernelreg: {more:.0f} ms more than a bare interpreter")
    print(f"kernelreg doctor: {ratio:.1f} times faster than torch.utils.collect_env")


if __name__ == "__main__":
    main()
