"""``kernelreg backends --stale``: descriptors against what made-up and installed libraries say of themselves."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kernelreg
from kernelreg.claims import Claim, Unasked, refusal
from kernelreg.cli import main
from kernelreg.descriptor import Span, make_descriptor
from kernelreg.registry import Backend, discover
from kernelreg.stale import Checked, check, compare, listen
from tests import machines
from tests.distributions import install

ROOT = Path(__file__).parent.parent


def installed(*names: str) -> pytest.MarkDecorator:
    """Skip where a distribution is missing."""
    missing = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


# -- comparing ---------------------------------------------------------------------------------------------------------

PACKAGES = {"acme-gdn": "1.5"}


def backend(*kernels: dict[str, Any], **changes: Any) -> Backend:
    """A backend for Hopper, K up to 128, bfloat16; a second row for releases before 1.0 takes more."""
    rows: list[dict[str, Any]] = [
        {
            "name": "new",
            "requires": {"compute_capability": "==9.0", "packages": {"acme-gdn": ">=1"}},
            "accepts": {
                "dtype": ["bfloat16"],
                "head_dim_k": {"max": 128},
                "features": ["backward"],
                "source": {"head_dim_k": "https://example.org/k"},
            },
        },
        {"name": "old", "requires": {"packages": {"acme-gdn": "<1"}}, "accepts": {"features": ["backward"]}},
    ]
    whole = [{"operation": "gdn.chunk", "function": "run", **row} for row in (kernels or rows)]
    data = {"schema": 1, "name": "acme", "adapter": "acme_gdn", "claims": "acme_claims", "kernel": whole}
    requires = {"device": "cuda", "torch": ">=99", "tools": {"nvcc": ">=99"}, "packages": {"acme-gdn": "*"}}
    return Backend(descriptor=make_descriptor({**data, "requires": requires, **changes}), origin="a test")


def claim(takes: bool, **changes: Any) -> Claim:
    return Claim(
        **{"operation": "gdn.chunk", "asked": "acme.list", "takes": takes, "said": None if takes else "no", **changes}
    )


def compared(each: Claim, over: Backend | None = None) -> Checked:
    return compare(over or backend(), machines.machine("cpu-only", packages=PACKAGES), [each])


@pytest.mark.parametrize(
    ("each", "limit"),
    [
        (claim(True, compute_capability="9.0"), None),
        (claim(False, compute_capability="9.0"), "too wide"),
        (claim(True, compute_capability="10.0"), "too narrow"),
        (claim(False, compute_capability="10.0"), None),
        (claim(True, dtype="bfloat16"), None),
        (claim(True, dtype="float16"), "too narrow"),
        (claim(False, dtype="bfloat16"), "too wide"),
        (claim(True, head_dim_k=128), None),
        (claim(True, head_dim_k=256), "too narrow"),
        (claim(False, head_dim_k=256), None),
        (claim(False, head_dim_k=64), "too wide"),
        (claim(False, features=("backward",)), "too wide"),
        (claim(True, features=("varlen",)), "too narrow"),
        (claim(True, features=("varlen",), operation="gdn.recurrent"), "too narrow"),  # no row at all
        (claim(False, operation="gdn.recurrent"), None),
        (claim(True, device="rocm"), "too narrow"),
        (claim(False, device="xpu"), None),
        (claim(True, kernels=("old",)), "too narrow"),  # the row is for other releases
        (claim(False, kernels=("old",)), None),
    ],
)
def test_a_limit_is_too_wide_or_too_narrow_where_the_library_says_otherwise(each: Claim, limit: str | None) -> None:
    result = compared(each)
    assert [stale.limit for stale in result.stale] == ([limit] if limit else [])
    assert result.agreed == (0 if limit else 1)


def test_the_contradiction_names_the_row_its_reason_and_the_source() -> None:
    (stale,) = compared(claim(True, head_dim_k=256)).stale
    assert stale.kernels == ("new",)
    (reason,) = stale.reasons  # this machine's torch and nvcc, which do not fit either, are not the library's matter
    assert (reason.code, reason.url) == ("head-dim", "https://example.org/k")
    (stale,) = compared(claim(False, head_dim_k=64)).stale
    assert (stale.kernels, stale.claim.said) == (("new",), "no")


def test_a_known_fault_is_a_refusal_and_one_that_the_library_need_not_know() -> None:
    fault = {
        "when": {"compute_capability": "==9.0", "packages": {"acme-gdn": "<2"}},
        "severity": "wrong-result",
        "because": "it is wrong",
        "url": "https://example.org/1",
    }
    faulty = backend(known_bad=[fault])
    for takes in (True, False):
        result = compared(claim(takes, compute_capability="9.0"), faulty)
        assert (result.agreed, result.stale) == (1, ())
    # Nothing is known of which card another answer is about: the fault of one card says nothing there.
    assert compared(claim(False, dtype="bfloat16"), faulty).stale[0].limit == "too wide"


@pytest.mark.parametrize("change", [{"operation": "gdn.chnk"}, {"dtype": "bf16"}, {"features": ("varlne",)}])
def test_a_claim_of_what_there_is_not_is_told_and_the_others_hold(change: dict[str, Any]) -> None:
    facts = machines.machine("cpu-only", packages=PACKAGES)
    result = compare(backend(), facts, [claim(True, **change), claim(True, compute_capability="9.0")])
    assert result.agreed == 1
    assert "did you mean" in result.unasked[0].cause


# -- asking ------------------------------------------------------------------------------------------------------------

HEAD = "from kernelreg.claims import Claim, Unasked\n"
SAYS = """    yield Claim(
        operation='gdn.chunk', asked='acme.list', takes={takes}, compute_capability='{card}', said={said!r}
    )
"""


def acme(site: Path, code: str) -> None:
    """Install a made-up library with its backend and its claims."""
    text = """schema = 1
name = "acme"
adapter = "acme_gdn.adapter"
claims = "acme_gdn.claims"
requires = { device = "cuda", packages = { acme-gdn = "*" } }
[[kernel]]
operation = "gdn.chunk"
name = "fast"
function = "run"
requires = { compute_capability = "==9.0" }
"""
    files = {"acme_gdn/__init__.py": "", "acme_gdn/backend.toml": text, "acme_gdn/claims.py": HEAD + code}
    install(site, "acme-gdn", entry_points={"acme": "acme_gdn"}, files=files)


ALONE = """
import sys
from kernelreg.cli import main
from kernelreg.registry import Registry
from kernelreg.session import session

found = session.registry()
session.registry = lambda: Registry(tuple(each for each in found.backends if each.name in ('acme', 'torch')))
sys.exit(main(sys.argv[1:]))
"""


def stale(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``kernelreg backends --stale`` without this project's backends' libraries, whose turn takes long."""
    path = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", ALONE, "backends", "--stale", *words],
        cwd=site,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("answers", "code", "told"),
    [
        ([("9.0", True), ("8.0", False)], 0, ["2 of its library's answers agree"]),
        (
            [("9.0", False)],
            1,
            ["too wide: gdn.chunk, compute capability 9.0", "fast would take it", "acme.list refuses it: gone"],
        ),
        (
            [("9.0", True), ("10.0", True)],
            1,
            [
                "1 of its library's answers agree",
                "too narrow: gdn.chunk, compute capability 10.0",
                "fast: compute-capability: needs compute capability ==9.0, here 10.0",
            ],
        ),
    ],
)
def test_the_command_says_what_is_out_of_date(
    answers: list[tuple[str, bool]], code: int, told: list[str], tmp_path: Path
) -> None:
    body = "".join(SAYS.format(takes=takes, card=card, said=None if takes else "gone") for card, takes in answers)
    acme(tmp_path, "def claims():\n" + body)
    done = stale(tmp_path)
    assert (done.returncode, done.stderr) == (code, "")
    assert "acme  acme-gdn 1.0" in done.stdout
    assert "nothing to ask: torch" in done.stdout
    assert [words for words in told if words not in done.stdout] == []
    done = stale(tmp_path, "--json")
    assert done.returncode == code
    data = json.loads(done.stdout)
    assert (data["schema"], data["stale"], data["nothing_to_ask"]) == (1, bool(code), ["torch"])
    assert [each["backend"] for each in data["backends"]] == ["acme"]
    assert data["backends"][0]["packages"] == {"acme-gdn": "1.0"}


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise ImportError('a') from OSError('libfoo.so')", "ImportError: a ← OSError: libfoo.so"),
        ("def claims():\n    raise SystemExit(3)", "SystemExit: 3"),
        ("def claims():\n    return [3]", "TypeError: claims() gave a int, neither Claim nor Unasked"),
        ("import os; os.abort()", "the process died of SIGABRT"),
        ("claims = None", "claims is a NoneType, not a callable"),
        ("while True: pass", "no answer within 2 s"),
        ("def claims():\n    yield Unasked(asked='acme', cause='no card')", "no card"),
    ],
    ids=["import", "exit", "nonsense", "abort", "no function", "hang", "its own word"],
)
def test_what_cannot_be_asked_is_told_with_its_cause(
    code: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme(tmp_path, code)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = [each for each in discover().backends if each.name == "acme"]
    limit = 2 if "while" in code else 60
    result = check(found, machines.machine("cpu-only", packages={"acme-gdn": "1.0"}), limit)
    assert result is not None
    assert (result.agreed, result.stale) == (0, ())
    (lost,) = result.unasked
    assert cause in lost.cause
    assert "acme_gdn.claims" not in sys.modules


def test_what_was_said_before_a_fault_still_holds(tmp_path: Path) -> None:
    acme(
        tmp_path,
        "def claims():\n" + SAYS.format(takes=False, card="9.0", said="gone") + "    raise ValueError('then this')",
    )
    done = stale(tmp_path)
    assert done.returncode == 1
    assert "too wide" in done.stdout
    assert "cannot be asked: acme_gdn.claims: ValueError: then this" in done.stdout


def test_a_library_that_is_not_installed_is_not_asked() -> None:
    found = check(backend(), machines.machine("cpu-only"))
    assert found is not None
    assert found.unasked == (Unasked(asked="acme", cause="not installed: acme-gdn"),)


def test_stale_speaks_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--stale", "--facts", str(machines.FACTS / "h200.json")]) == 2
    assert "--stale asks the libraries that are installed here" in capsys.readouterr().err


def test_a_refusal_is_the_functions_own() -> None:
    def deeper() -> None:
        raise ValueError("in the launch")

    def asked(x: int) -> None:
        if x > 1:
            raise ValueError("too large")
        if x < 0:
            x.nothing  # type: ignore[attr-defined]  # noqa: B018
        deeper()

    assert refusal(asked, 2) == "ValueError: too large"
    assert refusal(asked, 0) is None
    with pytest.raises(AttributeError):
        refusal(asked, -1)
    with pytest.raises(TypeError):
        refusal(asked)


# -- this project's own ------------------------------------------------------------------------------------------------


def changed(name: str, row: str, **accepts: Any) -> Backend:
    """One of this project's backends with another limit in one row."""
    found = next(each for each in discover(plugins=False).backends if each.name == name)
    rows = [
        msgspec.structs.replace(each, accepts=msgspec.structs.replace(each.accepts, **accepts))
        if each.name == row
        else each
        for each in found.descriptor.kernel
    ]
    return msgspec.structs.replace(found, descriptor=msgspec.structs.replace(found.descriptor, kernel=tuple(rows)))


def told(over: Backend, said: tuple[Claim | Unasked, ...]) -> set[tuple[str, str]]:
    return {(each.limit, each.claim.subject) for each in compare(over, kernelreg.facts(), said).stale}


@installed("flash-linear-attention", "triton", "tilelang")
def test_flas_own_checks_agree_with_its_descriptor_and_would_not_with_another() -> None:
    said = listen("kernelreg_backends.fla.claims")
    assert [each for each in said if isinstance(each, Unasked)] == []
    assert len(said) >= 15
    assert told(changed("fla", "triton"), said) == set()
    wide = changed("fla", "triton", head_dim_k=Span(min=1, max=300))
    assert told(wide, said) == {("too wide", "gdn.chunk, head_dim_k=257")}
    narrow = changed("fla", "triton", head_dim_k=Span(min=1, max=128))
    assert told(narrow, said) == {("too narrow", "gdn.chunk, head_dim_k=256")}
    assert ("too narrow", "gdn.chunk, dtype=float32") in told(changed("fla", "triton", dtype=("bfloat16",)), said)
    recurrent = {each for each in said if isinstance(each, Claim) and each.operation == "gdn.recurrent"}
    assert [(each.takes, each.features) for each in recurrent] == [(False, ("backward",))]


@installed("flash-qla", "tilelang")
def test_flash_qlas_targets_agree_with_its_descriptor_and_would_not_with_another() -> None:
    said = listen("kernelreg_backends.flash_qla.claims", 300)
    assert [each for each in said if isinstance(each, Unasked)] == []
    ours = changed("flash_qla", "sm90")
    assert told(ours, said) == set()
    targets = {each.compute_capability: each.takes for each in said if isinstance(each, Claim) and not each.features}
    if importlib.metadata.version("flash-qla") == "0.1.3":
        assert {card for card, takes in targets.items() if card and takes} == {"9.0", "10.0", "10.3"}
        # The two known faults of this release are what its own imports say; without them the rows are too wide.
        sound = msgspec.structs.replace(ours, descriptor=msgspec.structs.replace(ours.descriptor, known_bad=()))
        assert told(sound, said) == {
            ("too wide", "gdn.chunk, compute capability 12.0"),
            ("too wide", "gdn.chunk, compute capability 12.1"),
        }
    assert {card: takes for card, takes in targets.items() if card == "8.0"} == {"8.0": False}


KERNELS = "chunk_gated_delta_rule_sm90 = chunk_gated_delta_rule_sm100 = print\nchunk_gated_delta_rule_sm120 = None\n"
LISTED = "class F:\n    def is_compute_capability_supported(self, cc): return cc in (90, 100)\n"


_PREFILL, _SM120 = (
    "flashinfer.gdn_prefill.chunk_gated_delta_rule",
    "flashinfer.gdn_kernels.chunk_gated_delta_rule_sm120",
)


@pytest.mark.parametrize(
    ("files", "takes", "lost", "contradicted"),
    [
        (
            {"gdn_prefill.py": "chunk_gated_delta_rule = print", "gdn_kernels.py": KERNELS},
            {"9.0", "10.0", "10.3", "10.7"},
            {_SM120},
            {("too narrow", "10.7")},
        ),
        (
            {
                "gdn_prefill.py": "chunk_gated_delta_rule = print",
                "gdn_kernels.py": KERNELS,
                "cute_dsl/__init__.py": "",
                "cute_dsl/availability.py": "def is_cute_dsl_arch_supported(major, minor): return minor < 7",
            },
            {"9.0", "10.0", "10.3"},
            {_SM120},
            set(),
        ),
        (
            {"gdn_prefill.py": LISTED + "chunk_gated_delta_rule = F()"},
            {"9.0", "10.0"},
            set(),
            {("too wide", "10.3"), ("too wide", "12.0"), ("too wide", "12.1")},
        ),
        ({"gdn_prefill.py": "raise OSError('libcuda.so')"}, set(), {_PREFILL}, set()),
        ({"gdn_prefill.py": "chunk_gated_delta_rule = print", "gdn_kernels.py": ""}, set(), {_PREFILL}, set()),
    ],
    ids=["kernels", "compiler", "list", "broken", "others"],
)
def test_flashinfer_is_asked_for_its_lists_and_its_kernels(
    files: dict[str, str],
    takes: set[str],
    lost: set[str],
    contradicted: set[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over made-up modules with the names of flashinfer 0.7.4; the library itself is not installed here."""
    decode = "def gated_delta_rule_decode_pretranspose(): pass"
    package = {"__init__.py": "", "gdn_decode.py": decode, **files}
    install(tmp_path, "flashinfer-python", files={f"flashinfer/{name}": text for name, text in package.items()})
    monkeypatch.syspath_prepend(tmp_path)
    said = listen("kernelreg_backends.flashinfer.claims", 60)
    cards = {each.compute_capability for each in said if isinstance(each, Claim) and each.takes}
    assert cards == takes
    decoding = "flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose"
    assert {each.asked for each in said if isinstance(each, Unasked)} == {decoding, *lost}
    packages = {"flashinfer-python": "0.7.4", "nvidia-cutlass-dsl-libs-cu13": "4.5.0"}
    result = compare(changed("flashinfer", "sm90"), machines.machine("h200", packages=packages), said)
    assert {(each.limit, each.claim.compute_capability) for each in result.stale} == contradicted
