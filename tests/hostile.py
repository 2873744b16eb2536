"""Hostile plugins: what is wrong with each, and what must be said of it. docs/failures.md has a row for each case."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.distributions import install


@dataclass(frozen=True)
class Hostile:
    """A plugin whose adapter does harm when it is imported.

    Attributes:
        code: of the adapter; its function is ``run``.
        reason: the code of the reason that ``doctor --deep`` gives, or None where the import succeeds.
        said: words of that reason, or of what the doctor notices.
        deadly: it would take the importing process along, so that only a child may import it.
    """

    code: str
    reason: str | None
    said: str
    deadly: bool = False


RUN = "\ndef run(*arguments, **options): raise RuntimeError('not called')\n"

#: What an import can do, by the case's name. Every one is imported by ``doctor --deep``, and what is not deadly here.
IMPORTS = {
    "ImportError": Hostile("raise ImportError('no such kernel')", "import-error", "ImportError: no such kernel"),
    "missing library": Hostile(
        "try: raise OSError('libfoo.so: cannot open')\nexcept OSError as error: raise ImportError('a') from error",
        "import-error",
        "ImportError: a ← OSError: libfoo.so: cannot open",
    ),
    "ValueError": Hostile("raise ValueError('no GPU')", "import-error", "ValueError: no GPU"),
    "OSError": Hostile("import ctypes; ctypes.CDLL('libnowhere.so')", "import-error", "OSError: libnowhere.so"),
    "SystemExit": Hostile("raise SystemExit(3)", "import-error", "SystemExit: 3"),
    "RecursionError": Hostile("def f(): f()\nf()", "import-error", "RecursionError: maximum recursion"),
    "syntax error": Hostile("def (", "import-error", "SyntaxError: invalid syntax"),
    "error without words": Hostile(
        "class Mute(BaseException):\n    def __str__(self): raise SystemExit\nraise Mute",
        "import-error",
        "Mute",
    ),
    "error that writes to the terminal": Hostile(
        "raise ValueError('\\x1b[2J' + 'x' * 100_000 + '\\nmore')", "import-error", "ValueError: ?[2Jxxx"
    ),
    "no such function": Hostile("del run", "import-error", "has no attribute 'run'"),
    "no callable": Hostile("run = 3", "import-error", "run is a int, not a callable"),
    "attributes that raise": Hostile(
        "del run\ndef __getattr__(name): raise KeyError(name)", "import-error", "KeyError: 'run'"
    ),
    "abort in C": Hostile(
        "import os, sys; print('out of luck', file=sys.stderr, flush=True); os.abort()",
        "probe-error",
        "the process died of SIGABRT; its last words: out of luck",
        deadly=True,
    ),
    "segmentation fault": Hostile(
        "import ctypes; ctypes.string_at(0)", "probe-error", "the process died of SIGSEGV", deadly=True
    ),
    "exit in C": Hostile("import os; os._exit(7)", "probe-error", "the process ended with exit code 7", deadly=True),
    "exit without an error": Hostile(
        "import os; os._exit(0)", "probe-error", "the process ended with exit code 0", deadly=True
    ),
    "KeyboardInterrupt": Hostile(
        "raise KeyboardInterrupt",
        "probe-error",
        "the process died of SIGINT; its last words: KeyboardInterrupt",
        deadly=True,
    ),
    "prints": Hostile("print('welcome to acme')", None, "it printed 'welcome to acme'"),
    "overrides the policy": Hostile(
        "import os; os.environ['KERNELREG_BACKEND'] = 'acme'", None, "KERNELREG_BACKEND was not set, is 'acme'"
    ),
    "hides the devices": Hostile(
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '7'", None, "CUDA_VISIBLE_DEVICES was not set, is '7'"
    ),
    "changes the environment": Hostile("import os; os.environ['ACME_TOKEN'] = 'secret'", None, "it changed ACME_TOKEN"),
}

#: Needs torch to be there.
PATCHES = {
    "patches torch": Hostile(
        "import torch, functools\nold = torch.matmul\ntorch.matmul = functools.wraps(old)(lambda *a: old(*a))",
        None,
        "it replaced torch.matmul",
    ),
}

#: Imported alone: it takes the whole limit.
LOOPS = {
    "endless loop": Hostile(
        "print('still here', flush=True)\nimport sys; print('busy', file=sys.stderr, flush=True)\nwhile True: pass",
        "probe-error",
        "no answer within",
        deadly=True,
    ),
    "endless output": Hostile(
        "import sys\nwhile True: sys.stderr.write('x' * 10_000)", "probe-error", "no answer within", deadly=True
    ),
}


def package(case: str) -> str:
    """A case's package, and its backend's name."""
    return "hostile_" + "".join(letter if letter.isalnum() else "_" for letter in case.lower())


def descriptor(name: str, adapter: str | None = None, speedup: float = 1e6) -> str:
    """A backend's ``backend.toml`` that outranks all others on every machine."""
    return f"""schema = 1
name = "{name}"
adapter = "{adapter or name + ".adapter"}"
[[kernel]]
operation = "gdn.chunk"
name = "only"
function = "run"
preference = [{{ speedup = {speedup!r}, source = "made up" }}]
"""


def install_hostile(site: Path, case: str, hostile: Hostile) -> str:
    """Install a plugin; gives its backend's name."""
    name = package(case)
    code = RUN + hostile.code + "\n"
    files = {f"{name}/__init__.py": "", f"{name}/adapter.py": code, f"{name}/backend.toml": descriptor(name)}
    install(site, name, entry_points={name: name}, files=files)
    return name


def _toml(site: Path, text: str | bytes) -> None:
    install(site, "broken", entry_points={"broken": "broken"}, files={"broken/__init__.py": ""})
    (site / "broken" / "backend.toml").write_bytes(text.encode() if isinstance(text, str) else text)


def _fifo(site: Path) -> None:
    install(site, "broken", entry_points={"broken": "broken"}, files={"broken/__init__.py": ""})
    os.mkfifo(site / "broken" / "backend.toml")


def _twin(name: str) -> Callable[[Path], None]:
    return lambda site: _toml(site, descriptor(name))


def _point(value: str) -> Callable[[Path], None]:
    def make(site: Path) -> None:
        install(site, "broken", entry_points={"broken": value})

    return make


def _entry_points(data: bytes) -> Callable[[Path], None]:
    def make(site: Path) -> None:
        (install(site, "broken") / "entry_points.txt").write_bytes(data)

    return make


def _folder(site: Path) -> None:
    install(site, "broken", entry_points={"broken": "broken"}, files={"broken/backend.toml/x": ""})


def _link(target: str) -> Callable[[Path], None]:
    def make(site: Path) -> None:
        install(site, "broken", entry_points={"broken": "broken"}, files={"broken/__init__.py": ""})
        (site / "broken" / "backend.toml").symlink_to(target)

    return make


def _metadata(site: Path) -> None:
    _toml(site, b"nothing")
    (site / "broken-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00\x80")


#: What a distribution can have wrong before any code is run: how it is made, and words of the problem.
DISCOVERY: dict[str, tuple[Callable[[Path], None], str]] = {
    "entry point to nothing": (_point("no_such_package"), "leads to no descriptor; looked for: no package"),
    "entry point that names nothing": (_point("not a module!"), "accepted: package, or package:file.toml"),
    "entry points that cannot be read": (_entry_points(b"\xff\xfe\x00"), "UnicodeDecodeError"),
    "metadata that cannot be read": (_metadata, "not TOML"),
    "broken TOML": (lambda site: _toml(site, "schema = 1\nname = \n"), "not TOML: "),
    "enormous TOML": (lambda site: _toml(site, b"#" * (40 << 20)), "larger than 256 KiB"),
    "nested TOML": (lambda site: _toml(site, "a = " + "[" * 100_000), "not TOML: "),
    "dotted TOML": (lambda site: _toml(site, "a." * 100_000 + "a = 1"), "a key of more than 64 parts"),
    "unknown key": (lambda site: _toml(site, descriptor("broken") + "fast = true\n"), "unknown key 'fast'"),
    "descriptor that is a pipe": (_fifo, "leads to no descriptor"),
    "descriptor that is a directory": (_folder, "leads to no descriptor"),
    "descriptor that is a link to itself": (_link("backend.toml"), "leads to no descriptor"),
    "descriptor that is a link to nothing": (_link("nowhere"), "leads to no descriptor"),
    "descriptor that is binary": (lambda site: _toml(site, b"\x7fELF\xff\x00"), "not UTF-8 at byte 4"),
    "entry point to the standard library": (_point("os"), "leads to no descriptor; looked for: no package 'os'"),
    "entry point without end": (_point("a" * 70_000), "an entry point of more than 300 characters"),
    "name of ours": (_twin("torch"), "a backend named 'torch' is there already, from kernelreg: "),
}
