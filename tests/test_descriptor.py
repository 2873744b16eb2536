"""Descriptors: what is read, what is refused and in which words, and that every limit of ours has its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernelreg.descriptor import Descriptor, PackageRule, Requires, Span, load_descriptor, make_descriptor
from kernelreg.errors import DescriptorError
from kernelreg.registry import discover
from kernelreg.schema import descriptor_schema

ROOT = Path(__file__).parents[1]

#: The descriptor that the design fixes for third parties.
EXAMPLE = """
schema = 1
name = "flash_qla"
adapter = "kernelreg_backends.flash_qla.adapter"
homepage = "https://github.com/QwenLM/FlashQLA"
install = "pip install flash-qla"

[requires]                                  # all kernels of this backend
device = "cuda"                             # cuda | rocm | xpu | cpu | any
torch = ">=2.8"
cuda = ">=12.8"
tools = { nvcc = "*" }
packages = { flash-qla = ">=0.1.1" }

[[kernel]]
operation = "gdn.chunk"
name = "sm90"
function = "chunk_gated_delta_rule"          # in the adapter
requires = { compute_capability = "==9.0" }
accepts = { dtype = ["bfloat16", "float16"], gate_dtype = ["float32"], head_dim_k = [128], head_dim_v = [128], features = ["varlen", "initial-state", "final-state", "grouped-value-heads", "backward", "qk-l2norm", "state-v-first"] }
validated_on = ["9.0"]

[[known_bad]]
when = { packages = { flash-qla = "<0.1.2" }, features = ["empty-sequences"] }
severity = "wrong-result"                    # wrong-result | crash | hang | slow
because = "..."
url = "https://..."
"""  # noqa: E501  (as the design has it)

BUILT_IN = [each for each in discover(plugins=False).backends if each.origin.startswith("kernelreg:")]


def kernel(**changes: Any) -> dict[str, Any]:
    """A row as plain data."""
    return {"operation": "gdn.chunk", "name": "only", "function": "run", **changes}


def backend(**changes: Any) -> dict[str, Any]:
    """A one-row descriptor as plain data."""
    return {"schema": 1, "name": "acme", "adapter": "acme.adapter", "kernel": [kernel()], **changes}


def fault(**when: Any) -> dict[str, Any]:
    """A known fault as plain data."""
    return {"when": when, "severity": "crash", "because": "it crashes", "url": "https://example.org/1"}


def preference(**when: Any) -> list[dict[str, Any]]:
    return [{"speedup": 2.0, "source": "measured", "when": when}]


def test_the_designs_example_is_a_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "backend.toml"
    path.write_text(EXAMPLE, encoding="utf-8")
    descriptor = load_descriptor(path)
    (row,) = descriptor.kernel
    (known_bad,) = descriptor.known_bad
    assert (descriptor.name, descriptor.requires.torch, descriptor.requires.tools) == (
        "flash_qla",
        ">=2.8",
        {"nvcc": "*"},
    )
    assert (row.name, row.requires.compute_capability, row.accepts.head_dim_k) == ("sm90", "==9.0", (128,))
    assert (known_bad.severity, known_bad.when.features) == ("wrong-result", ("empty-sequences",))
    assert descriptor.packages == {"flash-qla"}


@pytest.mark.parametrize(
    ("data", "place", "said"),
    [
        (backend(nmae="x"), "", "unknown key 'nmae'; accepted: accepts, adapter,|did you mean 'name'?"),
        (backend(requires={"torhc": ">=2"}), "requires", "unknown key 'torhc'|did you mean 'torch'?"),
        (
            backend(requires={"packages": {"x": {"versoin": "*"}}}),
            "requires.packages[...]",
            "unknown key 'versoin'; accepted: also, by, version|did you mean 'version'?",
        ),
        (backend(accepts={"dtpye": []}), "accepts", "unknown key 'dtpye'|did you mean 'dtype'?"),
        (backend(kernel=[kernel(fucntion="f")]), "kernel[0]", "unknown key 'fucntion'|did you mean 'function'?"),
        (
            backend(kernel=[kernel(), kernel(name="b", requires={"cdua": "*"})]),
            "kernel[1].requires",
            "unknown key 'cdua'|did you mean 'cuda'?",
        ),
        (
            backend(kernel=[kernel(accepts={"head_dim_k": {"maxx": 8}})]),
            "kernel[0].accepts.head_dim_k",
            "unknown key 'maxx'; accepted: max, min, multiple_of|did you mean 'max'?",
        ),
        (
            backend(kernel=[kernel(preference=preference(tokns={}))]),
            "kernel[0].preference[0].when",
            "unknown key 'tokns'|did you mean 'tokens'?",
        ),
        (
            backend(kernel=[kernel(preference=preference(tokens={"mim": 1}))]),
            "kernel[0].preference[0].when.tokens",
            "unknown key 'mim'|did you mean 'min'?",
        ),
        (backend(known_bad=[fault() | {"urll": "x"}]), "known_bad[0]", "unknown key 'urll'|did you mean 'url'?"),
        (backend(known_bad=[fault(featurs=[])]), "known_bad[0].when", "unknown key 'featurs'|did you mean 'features'?"),
        (
            backend(requires={"source": {"torhc": "x"}}),
            "requires",
            "unknown key in source 'torhc'|did you mean 'torch'?",
        ),
        (
            backend(kernel=[kernel(accepts={"source": {"dtpye": "x"}})]),
            "kernel[0].accepts",
            "unknown key in source 'dtpye'|did you mean 'dtype'?",
        ),
        (backend(accepts={"source": {"source": "x"}}), "accepts", "unknown key in source 'source'|accepted: dtype,"),
        (backend(schema=2), "schema", "unknown value '2'; accepted: 1"),
        (backend(requires={"device": "cdua"}), "requires.device", "unknown value 'cdua'|did you mean 'cuda'?"),
        (backend(requires={"device": ["rcm"]}), "requires.device[0]", "unknown value 'rcm'|did you mean 'rocm'?"),
        (
            backend(kernel=[kernel(accepts={"dtype": ["bf16"]})]),
            "kernel[0].accepts.dtype[0]",
            "accepted: bfloat16, float16, float32, float64; did you mean 'bfloat16'?",
        ),
        (
            backend(known_bad=[fault() | {"severity": "crsh"}]),
            "known_bad[0].severity",
            "accepted: crash, hang, slow, wrong-result; did you mean 'crash'?",
        ),
        (backend(requires={"torch": ">>2"}), "requires", 'torch: Invalid specifier|accepted: "*" for any'),
        (backend(requires={"torch": ""}), "requires", 'torch: an empty version range; accepted: "*"'),
        (backend(requires={"torch": "===2.8"}), "requires", "torch: |compares text with '==='; accepted: ==, !="),
        (backend(requires={"torch": "==2.8+cu128"}), "requires", "torch: |local part (2.8+cu128), which never decides"),
        (backend(requires={"cuda": ">=12.8+cu128"}), "requires", "cuda: |'>=12.8+cu128'|accepted:"),
        (backend(requires={"tools": {"nvcc": "new"}}), "requires", "tools.nvcc: |'new'"),
        (backend(requires={"packages": {"x": "1.0"}}), "requires", "packages.x: |'1.0'"),
        (backend(requires={"packages": {"x": {"version": "1.0"}}}), "requires", "packages.x: |'1.0'"),
        (backend(known_bad=[fault(driver="new")]), "known_bad[0].when", "driver: |'new'"),
        (
            backend(kernel=[kernel(requires={"compute_capability": "==12"})]),
            "kernel[0].requires",
            "compute_capability: '==12' compares with '12'|\"==9.0\" (exact)|\"==10.*\" (family)",
        ),
        (
            backend(kernel=[kernel(preference=preference(compute_capability=">=8.0 ||"))]),
            "kernel[0].preference[0].when",
            "compute_capability: an empty version range",
        ),
        (backend(kernel=[kernel(operation="gdn.chnk")]), "kernel[0]", "unknown operation|did you mean 'gdn.chunk'?"),
        (
            backend(kernel=[kernel(accepts={"features": ["varlne"]})]),
            "kernel[0]",
            "unknown feature 'varlne'|did you mean 'varlen'?",
        ),
        (
            backend(kernel=[kernel(preference=preference(features=["captur"]))]),
            "kernel[0]",
            "unknown feature 'captur'|did you mean 'capture'?",
        ),
        (backend(accepts={"features": ["varlne"]}), "", "unknown feature 'varlne'|did you mean 'varlen'?"),
        (
            backend(known_bad=[fault(features=["bakward"])]),
            "",
            "feature in known_bad 'bakward'|did you mean 'backward'?",
        ),
        (backend(known_bad=[fault(kernels=["onyl"])]), "", "kernel in known_bad 'onyl'; accepted: only; did you mean"),
        (
            backend(requires={"packages": {"acme-lib": "*"}}, known_bad=[fault(packages={"acme_libs": "<2"})]),
            "",
            "'acme_libs'; accepted: acme-lib; did you mean 'acme-lib'?|must stand in requires too",
        ),
        (backend(kernel=[kernel(), kernel()]), "", "two kernels of gdn.chunk are named 'only'"),
        (backend(kernel=[kernel(), kernel(operation="gdn")]), "", "two kernels of gdn.chunk are named 'only'"),
        (backend(name="Flash-QLA"), "", "'Flash-QLA'; accepted: lower-case letters, digits and underscores"),
        (backend(adapter="acme/adapter.py"), "", "'acme/adapter.py'; accepted: a module's dotted name"),
        (backend(requires=3), "requires", "Expected `object`, got `int`"),
        (backend(kernel=[{"operation": "gdn", "name": "x"}]), "kernel[0]", "missing required field `function`"),
        (backend(kernel=[kernel(accepts={"heads": [-1]})]), "kernel[0].accepts.heads[0]", ">= 0"),
        (backend(kernel=[kernel(accepts={"heads": {"min": -1}})]), "kernel[0].accepts.heads.min", ">= 0"),
        (
            backend(kernel=[kernel(accepts={"heads": {"min": 4, "max": 2}})]),
            "kernel[0].accepts.heads",
            "no number is 4 to 2",
        ),
        (
            backend(known_bad=[fault(tokens={"min": 5, "max": 7, "multiple_of": 8})]),
            "known_bad[0].when.tokens",
            "no number is 5 to 7, a multiple of 8",
        ),
        (backend(requires={"device": []}), "requires.device", "length >= 1"),
        *(
            (
                backend(kernel=[kernel(preference=[{"speedup": speedup, "source": "x"}])]),
                f"kernel[0].preference[0]{place}",
                said,
            )
            for speedup, place, said in (
                (float("inf"), "", "speedup: inf; accepted: a finite number above 0"),
                (float("nan"), ".speedup", "> 0.0"),
                (0, ".speedup", "> 0.0"),
                (-2.5, ".speedup", "> 0.0"),
            )
        ),
        (backend(requires={"tools": {"ncvv": "*"}}), "requires", "unknown tool 'ncvv'; accepted: nvcc; did you mean"),
        (backend(kernel=[kernel(name="")]), "kernel[0].name", "length >= 1"),
        (backend(kernel=[kernel(name="two words")]), "kernel[0]", "name 'two words'; accepted: letters, digits"),
        (backend(kernel=[kernel(name="x" * 101)]), "kernel[0].name", "length <= 100"),
        *(
            (
                backend(kernel=[kernel(function=name)]),
                "kernel[0]",
                f"function {name!r}; accepted: the name of a callable",
            )
            for name in ("run()", "a.b", "class", "1st", "run it")
        ),
        *(
            (
                backend(kernel=[kernel(validated_on=[place])]),
                "kernel[0]",
                f"validated_on: {place!r}; accepted: a compute",
            )
            for place in ("9", "sm90", "any", "9.0.1", "H200")
        ),
        (backend(name="acme\n"), "name", "control characters, or more than one line"),
        (backend(adapter="acme.import"), "", "'acme.import'; accepted: a module's dotted name"),
        (backend(adapter="acme."), "", "'acme.'; accepted: a module's dotted name"),
        (backend(install="pip install acme\nrm -r ."), "install", "control characters, or more than one line"),
        (backend(homepage="\x1b[2Jhttps://example.org"), "homepage", "control characters, or more than one line"),
        (backend(homepage="https://example.org/\u202egpj"), "homepage", "control characters, or more than one line"),
        (backend(bridges={"a\x07": "b"}), "bridges", "a key of it: control characters"),
        (backend(bridges={"a": "b" * 1001}), "bridges[...]", "length <= 1000"),
        (backend(known_bad=[fault() | {"because": "x" * 2000}]), "known_bad[0].because", "length <= 1000"),
        (backend(requires={"torch": ">=1," * 100}), "requires.torch", "length <= 200"),
        (backend(requires={"packages": {"../x": "*"}}), "requires", "package '../x'; accepted: a distribution's name"),
        (
            backend(requires={"packages": {"x": {"also": [" y"]}}}),
            "requires",
            "package ' y'; accepted: a distribution's name",
        ),
        (backend(requires={"platform": ["linux"]}), "requires", "platform 'linux'; accepted: system-machine"),
        (backend(**{"x" * 100_000: 1}), "", "unknown key 'xxx|… (100000 characters)"),
    ],
)
def test_a_descriptor_that_is_wrong_is_told_where_and_what_is_accepted(
    data: dict[str, Any], place: str, said: str
) -> None:
    with pytest.raises(DescriptorError) as caught:
        make_descriptor(data)
    message = str(caught.value)
    assert message.startswith(f"descriptor: {place}: " if place else "descriptor: ")
    assert [words for words in said.split("|") if words not in message] == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'schema = 1\nname = "x"\nadapter = \n', "not TOML: |line 3"),
        (b"a = 1\na = 2\n", "not TOML: |line 2"),
        (b'schema = 1\nname = "\xff"\n', "not UTF-8 at byte 19"),
        (b'schema = 1\nname = "x"\nadapter = "x"\n[requires]\ntorhc = "*"\n', "requires: unknown key 'torhc'|'torch'?"),
        (b"", "missing required field `schema`"),
        (b"a = " + b"[" * 20_000, "not TOML"),
        (b"#" * (40 << 20), "larger than 256 KiB"),
        (b"a." * 100_000 + b"a = 1", "a key of more than 64 parts"),
        (b'"a" .' * 50_000 + b"a = 1", "a key of more than 64 parts"),
        (b"[" + b"a." * 100_000 + b"a]", "a key of more than 64 parts"),
        (b"a" * 200_000 + b" = 1", "unknown key"),
        (b'\\"' * 120_000, "not TOML"),
        (b"a = " + b"9" * 200_000, "not TOML"),
    ],
    ids=[
        "syntax",
        "repeated key",
        "encoding",
        "unknown key",
        "empty",
        "deep",
        "huge",
        "dotted",
        "dotted and quoted",
        "dotted table",
        "long key",
        "quotes",
        "digits",
    ],
)
def test_a_file_that_is_no_descriptor_is_named_with_its_fault(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_bytes(content)
    with pytest.raises(DescriptorError) as caught:
        load_descriptor(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert [words for words in said.split("|") if words not in message] == []


@pytest.mark.parametrize(("name", "said"), [("missing.toml", "No such file"), (".", "directory")])
def test_a_path_that_cannot_be_read_is_named_with_the_cause(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(DescriptorError, match=said) as caught:
        load_descriptor(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


def test_how_a_package_is_compared_is_said_once_and_holds_everywhere() -> None:
    rule = {"version": ">=3.0", "by": "release", "also": ["libx-rocm"]}
    row = kernel(
        requires={"packages": {"libx": ">=3.3", "liby": ">=1"}}, preference=preference(packages={"libx": "<4"})
    )
    data = backend(
        requires={"packages": {"libx": rule}},
        kernel=[row],
        known_bad=[fault(packages={"libx": {"version": "==3.4"}, "liby": "*"})],
    )
    descriptor = make_descriptor(data)
    (read,) = descriptor.kernel
    when = descriptor.known_bad[0].when
    also = ("libx-rocm",)
    assert descriptor.requires.packages == {"libx": PackageRule(version=">=3.0", by="release", also=also)}
    assert read.requires.packages["libx"] == PackageRule(version=">=3.3", by="release", also=also)
    assert read.requires.packages["liby"] == PackageRule(version=">=1", by="pep440")
    assert read.preference[0].when.packages["libx"] == PackageRule(version="<4", by="release", also=also)
    assert when.packages["libx"] == PackageRule(version="==3.4", by="release", also=also)
    assert descriptor.packages == {"libx", "libx-rocm", "liby"}


@pytest.mark.parametrize(("name", "by"), [("triton", "release"), ("torch", "release"), ("flash-qla", "pep440")])
def test_a_bare_range_compares_builds_by_release_and_packages_as_pep_440_says(name: str, by: str) -> None:
    for written in (">=3", {"version": ">=3"}):
        descriptor = make_descriptor(backend(requires={"packages": {name: written}}))
        assert descriptor.requires.packages[name] == PackageRule(version=">=3", by=by)  # type: ignore[arg-type]


def test_what_a_row_says_of_calls_stands_over_the_backends_word_key_by_key() -> None:
    base = {
        "dtype": ["bfloat16"],
        "features": ["varlen"],
        "head_dim_k": [128],
        "source": {"dtype": "a", "features": "b"},
    }
    own = {"dtype": ["float32"], "head_dim_v": {"min": 1}, "features": [], "source": {"dtype": "c"}}
    rows = [kernel(accepts=own), kernel(name="other")]
    descriptor = make_descriptor(backend(accepts=base, kernel=rows))
    first, second = (row.accepts for row in descriptor.kernel)
    assert (first.dtype, first.features, first.head_dim_k) == (("float32",), (), (128,))
    assert first.head_dim_v == Span(min=1)
    assert first.source == {"dtype": "c", "features": "b"}
    assert second == descriptor.accepts
    assert second.heads is None


@pytest.mark.parametrize(
    ("span", "value", "holds", "words"),
    [
        (Span(min=1, max=8), 8, True, "1 to 8"),
        (Span(min=1, max=8), 9, False, "1 to 8"),
        (Span(min=4), 3, False, "4 or more"),
        (Span(min=4), 10**9, True, "4 or more"),
        (Span(multiple_of=16), 24, False, "0 or more, a multiple of 16"),
        (Span(multiple_of=16), 0, True, "0 or more, a multiple of 16"),
        (Span(min=4096), None, True, "4096 or more"),
        (Span(max=4096), None, False, "0 to 4096"),
    ],
)
def test_a_span_holds_what_it_says_and_unknown_counts_as_many(
    span: Span, value: int | None, holds: bool, words: str
) -> None:
    assert span.holds(value) is holds
    assert str(span) == words


def test_an_operations_alias_is_read_as_its_name() -> None:
    assert make_descriptor(backend(kernel=[kernel(operation="gdn")])).kernel[0].operation == "gdn.chunk"


def limits(descriptor: Descriptor) -> dict[str, tuple[Any, dict[str, str]]]:
    """Every limit that a descriptor sets, by place, with the sources of its table."""
    tables: dict[str, Any] = {"requires": descriptor.requires}
    for row in descriptor.kernel:
        tables |= {f"{row.operation} {row.name} requires": row.requires}
        tables |= {f"{row.operation} {row.name} accepts": row.accepts}
    empty = Requires()
    return {
        f"{place}.{key}": (getattr(table, key), table.source)
        for place, table in tables.items()
        for key in table.__struct_fields__
        if key != "source" and getattr(table, key) not in (None, getattr(empty, key, None))
    }


@pytest.mark.parametrize("name", [each.name for each in BUILT_IN])
def test_every_limit_of_ours_has_its_source(name: str) -> None:
    descriptor = next(each.descriptor for each in BUILT_IN if each.name == name)
    said = limits(descriptor)
    assert said
    assert [place for place, (_, source) in said.items() if place.rpartition(".")[2] not in source] == []


@pytest.mark.parametrize("name", [each.name for each in BUILT_IN])
def test_every_rank_of_ours_cites_evidence_that_is_there(name: str) -> None:
    descriptor = next(each.descriptor for each in BUILT_IN if each.name == name)
    assert [row.name for row in descriptor.kernel if not row.preference] == []
    sources = [each.source for row in descriptor.kernel for each in row.preference]
    cited = {source for source in sources if source.startswith("docs/")}
    assert [source for source in sorted(cited) if not (ROOT / source).is_file()] == []


def test_the_published_schema_is_the_one_that_is_read_by() -> None:
    text = (ROOT / "docs" / "backend.schema.json").read_text(encoding="utf-8")
    assert text == descriptor_schema() + "\n"
