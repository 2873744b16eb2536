"""What is fuzzed: every place where kernelreg reads text that others wrote, as one table.

A target takes bytes and returns; a :class:`KernelregError` is an answer, too. What a target computes from its input
is checked where a second way to it exists: what was read is written, and reads back equal.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kernelreg.agreement import Agreement, Asked, Message, agree_on
from kernelreg.call import Call, make_call
from kernelreg.capability import matches_capability, parse_capabilities
from kernelreg.decoding import MAX_BYTES as FILE_BYTES
from kernelreg.decoding import decode_json, decode_toml
from kernelreg.descriptor import MAX_BYTES as DESCRIPTOR_BYTES
from kernelreg.descriptor import Descriptor, make_descriptor
from kernelreg.errors import ConfigurationError, DescriptorError, FactsError, KernelregError, encodable
from kernelreg.lock import MAX_BYTES as LOCK_BYTES
from kernelreg.lock import Lock, Pins
from kernelreg.machine.model import Device, Facts, Problem
from kernelreg.machine.tools import detect_tools
from kernelreg.machine.visible import Card, select_visible
from kernelreg.policy import VARIABLES, Policy, read_environment
from kernelreg.profile import MAX_BYTES as PROFILE_BYTES
from kernelreg.profile import Evidence, Profile, check_names
from kernelreg.registry import Backend, Registry, discover
from kernelreg.requirements import known_bad_reasons
from kernelreg.resolution import Resolution
from kernelreg.resolver import decide, judge
from kernelreg.series import series_of
from kernelreg.verify.records import Record
from kernelreg.versions import parse_range, parse_version, satisfies

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

#: Values that are odd wherever a value can stand.
ODD = (
    "1e999", "-1e999", "nan", "inf", "null", "true", "[]", "{}", '""', "-1", "0", "18446744073709551616", "9" * 400,
    "9" * 5000, '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', "\x00", "\ufeff", "\u202e", "\u0663", "\ud800", "ſ", "²",
    "0x10", "1_0", "+1", "[" * 2000, '{"a":' * 2000, "a." * 70, "1979-05-27T07:32:00Z", "'''", '"""', "\\", "\r\n",
)  # fmt: skip
_VERSION_WORDS = (
    "1!", ".dev1", "a0", "rc1", ".post1", "+cu128", "+git", "v", "-1", ".*", "==", "!=", "<=", ">=", "<", ">", "~=",
    "===", ",", "||", "*", " ", "9.0", "10.*", "2.8.0", "0" * 300, "1." * 300,
    ",>=2.8", ",!=2.3.*", ",<3", ">=8.0", "==9.*", "||==10.0", " || >=8.0,<9.0",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One reader of text.

    Attributes:
        run: reads; raises :class:`KernelregError` or nothing.
        words: pieces of the grammar that mutation puts in.
        seeds: texts to begin from.
        share: of all executions, in parts: quick targets take most.
        json: whether the text is JSON.
        longest: bytes that the reader is ever given: its own limit, or what an environment may hold.
    """

    name: str
    run: Callable[[bytes], None]
    words: tuple[str, ...]
    seeds: Callable[[], list[bytes]] = field(repr=False)
    longest: int
    share: int
    json: bool = False


def _text(data: bytes) -> str:
    """As an environment or an argument gives it: stray bytes become lone surrogates."""
    return data.decode("utf-8", "surrogateescape")


def _check(holds: bool, text: str) -> None:
    """An ``assert`` that ``python -O`` keeps."""
    if not holds:
        raise AssertionError(text)


# -- versions and rules ------------------------------------------------------------------------------------------------


def run_version(data: bytes) -> None:
    raw = _text(data)
    version = parse_version(raw)
    if version is not None:
        _check(parse_version(str(version)) == version, "a version reads back equal")


def run_range(data: bytes) -> None:
    text = _text(data)
    specifiers = parse_range(text)
    _check(parse_range(str(specifiers) or "*") == specifiers, "a range reads back equal")
    _check(
        satisfies("2.8.0a0+5228986c39.nv25.06", text, by_release=False) is not None, "a version is in a range or not"
    )


def run_pair(data: bytes) -> None:
    raw, _, text = _text(data).partition("\n")
    unread = parse_version(raw) is None
    for by_release in (True, False):
        _check((satisfies(raw, text, by_release=by_release) is None) is unread, "a version is in a range or not")


def run_capability(data: bytes) -> None:
    text = _text(data)
    parse_capabilities(text)
    for capability in ("9.0", "12.1", "999.999", ""):
        fits = matches_capability(capability, text)
        _check((fits is None) is (capability == ""), "a capability fits a rule or does not")
    matches_capability(text, "==9.0")


# -- files -------------------------------------------------------------------------------------------------------------


@functools.cache
def _registry() -> Registry:
    return discover(plugins=False)


@functools.cache
def _small() -> Registry:
    descriptor = decode_toml(_SMALL.encode(), Descriptor, source="fuzz", error=DescriptorError)
    return Registry((Backend(descriptor=descriptor, origin="fuzz"),))


@functools.cache
def _machines() -> tuple[Facts, ...]:
    return tuple(Facts.load(path) for path in sorted((TESTS / "facts").glob("*.json")))


def _use(descriptor: Descriptor) -> None:
    """A descriptor that was read decides on every sample machine, and writes and reads back as it is."""
    registry = Registry((Backend(descriptor=descriptor, origin="fuzz"),))
    for facts in _machines()[:2]:
        call = make_call("gdn", "cuda:0", tokens=4096, dtype="bfloat16", features={"varlen"})
        _told(registry, facts, call, Policy())
        known_bad_reasons(descriptor.known_bad, "any", facts, call)
    again = make_descriptor(msgspec.to_builtins(descriptor))
    _check(again == descriptor, "a descriptor reads back equal")


def _told(registry: Registry, facts: Facts, call: Call, policy: Policy) -> None:
    resolution = Resolution(decide(registry, facts, call, policy), None, facts)
    resolution.explain()
    _check(Resolution.from_json(resolution.to_json()) == resolution, "a resolution reads back equal")


def run_descriptor(data: bytes) -> None:
    _use(decode_toml(data, Descriptor, source="fuzz", error=DescriptorError))


def run_table(data: bytes) -> None:
    try:
        table: Any = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return  # Python data is what is tested here
    _use(make_descriptor(table))


def run_facts(data: bytes) -> None:
    facts = decode_json(data, Facts, source="fuzz", error=FactsError)
    again = decode_json(facts.to_json().encode(), Facts, source="fuzz", error=FactsError)
    _check(again == facts and again.fingerprint == facts.fingerprint, "facts read back equal")
    for operation in ("gdn.chunk", "gdn.recurrent"):
        for device in ("cpu", "cuda:0"):
            _told(_registry(), facts, make_call(operation, device, tokens=1, features={"varlen"}), Policy())


def run_profile(data: bytes) -> None:
    profile = decode_json(data, Profile, source="fuzz", error=ConfigurationError)
    again = decode_json(profile.to_json().encode(), Profile, source="fuzz", error=ConfigurationError)
    _check(again == profile, "a profile reads back equal")
    evidence = Evidence(profile, "fuzz")
    for facts in _machines()[:2]:
        profile.setup.changes(facts)
        for size in (None, 1, 4096):
            call = make_call("gdn", "cuda:0", tokens=size, sequences=size, heads=16, value_heads=32)
            Resolution(decide(_registry(), facts, call, Policy(), evidence=evidence)).explain()
    for operation in ("gdn.chunk", "gdn.recurrent"):
        evidence.edges(operation)
    list(map(str, series_of(profile)))
    check_names(evidence, _registry())


def run_lock(data: bytes) -> None:
    lock = decode_json(data, Lock, source="fuzz", error=ConfigurationError)
    again = decode_json(lock.to_json().encode(), Lock, source="fuzz", error=ConfigurationError)
    _check(again == lock, "a lock file reads back equal")
    pins = Pins(lock, "fuzz")
    for facts in _machines()[:2]:
        lock.setup.changes(facts)
        call = make_call("gdn", "cuda:0", tokens=4096, heads=16, value_heads=32)
        Resolution(decide(_registry(), facts, call, Policy(), pins=pins)).explain()
    pins.edges("gdn.chunk")


def run_resolution(data: bytes) -> None:
    resolution = Resolution.from_json(data)
    resolution.explain()
    _check(Resolution.from_json(resolution.to_json()) == resolution, "a resolution reads back equal")


def run_agreement(data: bytes) -> None:
    agreement = Agreement.from_json(data)
    agreement.explain()
    _check(Agreement.from_json(agreement.to_json()) == agreement, "an agreement reads back equal")


def run_record(data: bytes) -> None:
    record = decode_json(data, Record, source="fuzz", error=KernelregError)
    again = msgspec.json.encode(record, order="deterministic")
    _check(decode_json(again, Record, source="fuzz", error=KernelregError) == record, "a record reads back equal")
    for finding in record.findings(_machines()[0]):
        finding.holds("triton", "fla", make_call("gdn", "cuda:0"))
    record.trusting(None).trusting("fla").with_run(record.outcomes, "2026-12-03")


# -- the environment ---------------------------------------------------------------------------------------------------


_KNOWN = ("acme", "fla", "torch")


def run_environment(data: bytes) -> None:
    """Lines of ``NAME=value``, as ``env`` prints them."""
    lines = (line.partition("=") for line in _text(data).replace("\0", "").split("\n"))
    environ = {name: value for name, _, value in lines}
    policy, errors, warnings = read_environment(environ, _KNOWN)
    _check(all(str(each) for each in errors), "every error says something")
    _check(set(policy.disable + policy.prefer) <= set(_KNOWN), "only known names")
    _check(all(each.startswith("unknown environment variable") for each in warnings), "warnings are of names")
    path = environ.get("KERNELREG_FACTS", "")
    if path and not os.path.lexists(path):
        try:
            Facts.load(path)
        except FactsError:
            pass
        else:
            raise AssertionError("facts from a file that is not there")
    if policy.origin:
        _told(_small(), _machines()[0], make_call("gdn", "cuda:0"), policy)


def run_nvcc(data: bytes) -> None:
    """Two lines: CUDA_HOME and PATH."""
    home, _, path = _text(data).replace("\0", "").partition("\n")
    tools, problems = detect_tools({"CUDA_HOME": home, "PATH": path})
    _check(len(tools) <= 1 and (not home or bool(tools) or bool(problems)), "a CUDA_HOME without nvcc is a problem")
    # As the facts of this machine say it, to anyone who reads them.
    said = Facts(platform=_machines()[0].platform, problems=tuple(_encodable(each) for each in problems))
    _check(
        decode_json(said.to_json().encode(), Facts, source="fuzz", error=FactsError) == said, "facts read back equal"
    )


def _encodable(problem: Problem) -> Problem:
    return Problem(source=problem.source, error=encodable(problem.error))


_CARDS = tuple(
    Card(
        Device(index=0, type="cuda", uuid=f"GPU-{digit}0000000-0000-0000-0000-000000000001"),
        tuple(Device(index=0, type="cuda", uuid=f"MIG-{digit}{place}", mig=True) for place in range(2)),
        mig_enabled=digit == "b",
    )
    for digit in ("a", "ab", "b", "c")
)


def run_visible(data: bytes) -> None:
    devices, problems = select_visible(_CARDS, _text(data))
    _check([each.index for each in devices] == list(range(len(devices))), "numbered from 0")
    _check(len({each.uuid for each in devices}) == len(devices) <= len(_CARDS) + 2, "no device twice")
    _check(len(problems) <= 1, "one problem")


def run_call(data: bytes) -> None:
    """Lines of what a person may ask: operation, device, then ``option=value``."""
    operation, device, *options = (_text(data) + "\n").split("\n")
    said: dict[str, Any] = {}
    for name, _, value in (line.partition("=") for line in options if line):
        if name in ("operation", "device"):
            continue  # said already
        said[name] = int(value) if re.fullmatch(r"-?[0-9]{1,4000}", value) else value
        if name == "features":
            said[name] = value.split(",")
    for facts in _machines()[:1]:
        _told(_registry(), facts, make_call(operation, device, **said), Policy())


# -- the table ---------------------------------------------------------------------------------------------------------


def _keys(*types: type[msgspec.Struct]) -> tuple[str, ...]:
    """Every key and every word of the types and of all types below them: the grammar, from the code itself."""
    schemas = msgspec.json.schema_components(types)[1]
    words: dict[str, None] = {}
    for schema in schemas.values():
        words |= dict.fromkeys(schema.get("properties", ()))
    text = repr(schemas)
    for each in re.findall(r"'enum': \[([^\]]*)\]", text):
        words |= dict.fromkeys(re.findall(r"'([^']*)'", each))
    return tuple(words)


_FEATURES = ("varlen", "backward", "state-v-first", "initial-state", "capture")
_NAMES = ("fla", "flash_qla", "flashinfer", "torch", "triton", "gdn.chunk", "gdn.recurrent", "gdn", "cuda:0", "cpu")
_TOML = ("[", "]", "[[", "]]", "=", "\n", "#", "{", "}", ",", '"', "[[kernel]]", "[requires]", "[[known_bad]]")
_JSON = ("{", "}", "[", "]", ":", ",", '"', "null", "true", "\\u", "e")


def _files(*patterns: str) -> Callable[[], list[bytes]]:
    return lambda: [path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def _texts(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode("utf-8", "surrogateescape") for text in texts]


_SMALL = """schema = 1
name = "acme"
adapter = "acme.adapter"
[requires]
device = ["cuda", "cpu"]
compute_capability = "==9.0 || >=10.0,<11.0"
torch = ">=2.8"
packages = { triton = { version = ">=3", by = "release", also = ["pytorch-triton"] } }
[[kernel]]
operation = "gdn"
name = "only"
function = "run"
validated_on = ["9.0"]
accepts = { dtype = ["bfloat16"], head_dim_k = { min = 1, max = 256, multiple_of = 2 }, features = ["varlen"] }
preference = [{ speedup = 2.5, source = "made up", when = { tokens = { min = 64 } } }]
[[known_bad]]
severity = "wrong-result"
because = "made up"
url = "https://example.org"
when = { kernels = ["only"], packages = { triton = "<3.4" } }
"""


def _tables() -> list[bytes]:
    return [msgspec.json.encode(each.descriptor) for each in (*_small().backends, *_registry().backends)]


def _resolutions() -> list[bytes]:
    calls = [make_call("gdn", "cuda:0", dtype="bfloat16"), make_call("gdn.recurrent", "cpu", features=["varlen"])]
    decisions = [decide(_registry(), facts, call, Policy()) for facts in _machines()[:2] for call in calls]
    return [Resolution(each).to_json().encode() for each in decisions]


def _agreements() -> list[bytes]:
    call = make_call("gdn", "cuda:0", dtype="bfloat16")
    messages = [
        Message(rank=rank, host=f"node-{rank}", sent=str(rank), facts=facts, asked=(_asked(facts, call),))
        for rank, facts in enumerate(_machines()[:2])
    ]
    return [Agreement(agree_on(told, 0)[0]).to_json().encode() for told in (messages, messages[:1])]


def _asked(facts: Facts, call: Call) -> Asked:
    return Asked(call=call, policy=Policy(), judged=tuple(judge(_small(), facts, call, Policy())))


_RECORD = (
    '{"schema":1,"kernelreg":"0.1","date":"2026-12-01","fingerprint":"0","outcomes":[{"case":"a","operation":"gdn.chunk",'
    '"backend":"fla","device":"cuda:0","kernel":"triton","status":"wrong","errors":{"o":0.1},"bounds":{"o":1e-3},'
    '"worst_part":2.0,"reason":"made up","features":["varlen"],"dtype":"bfloat16"},{"case":"b","operation":"gdn.chunk",'
    '"backend":"fla","device":"cuda:0","kernel":"triton","status":"right","errors":{"o":1e-4}}]}'
)

_SETUP = (
    '{"kernelreg":"0.1.0","platform":"Linux x86_64","type":"cuda","card":"NVIDIA H200","compute_capability":"9.0",'
    '"driver":"580.159.04","torch":"2.11.0+cu130","packages":{"triton":"3.6.0","flash-qla":null}}'
)
_SHAPE = '"operation":"gdn.chunk","dtype":"bfloat16","heads":16,"value_heads":32,"head_dim_k":128,"head_dim_v":128'
_PROFILE = (
    f'{{"schema":1,"date":"2026-12-04","fingerprint":"0","setup":{_SETUP},"points":[{{{_SHAPE},"features":["varlen"],'
    '"tokens":4096,"sequences":8,"timings":[{"backend":"fla","kernel":"triton","median_us":41.5,"spread_us":1.0,'
    f'"repeats":7}}],"failures":[{{"backend":"torch","kernel":"chunk","reason":"made up"}}]}},{{{_SHAPE},"features":[],'
    '"tokens":1,"sequences":1,"timings":[{"backend":"torch","kernel":"chunk","median_us":1,"spread_us":0,"repeats":1}]}]}'
)
_LOCK = (
    f'{{"schema":1,"models":["qwen3.5-9b"],"tp":[1,2],"setup":{_SETUP},"versions":{{"fla":{{"torch":"2.11.0+cu130",'
    f'"triton":null}}}},"pins":[{{{_SHAPE},"gate_dtype":"float32","state_dtype":"float32","features":["varlen"],'
    '"tokens":{"min":64,"max":4096},"sequences":{"min":1},"backend":"fla","kernel":"triton"}]}'
)

_ENVIRONMENT_BYTES = 128 << 10  # Linux: MAX_ARG_STRLEN, one variable with its value

_ALL = (
    Target(
        name="version",
        run=run_version,
        words=_VERSION_WORDS,
        seeds=_texts("2.8.0", "2.8.0a0+5228986c39.nv25.06", "1!2.3.post4.dev5", "6.4.43482-0f2d60242", "main"),
        longest=FILE_BYTES,
        share=300,
    ),
    Target(
        name="range",
        run=run_range,
        words=_VERSION_WORDS,
        seeds=_texts("*", ">=2.8,<3", "~=2.8.1", "==2.*,!=2.3", "===2", "==1+a"),
        longest=DESCRIPTOR_BYTES,
        share=100,
    ),
    Target(
        name="pair",
        run=run_pair,
        words=_VERSION_WORDS,
        seeds=_texts("2.8.0\n>=2.8", "1!2+a\n==1!2", "2.0rc1\n~=2.0", "2\n*"),
        longest=DESCRIPTOR_BYTES,
        share=200,
    ),
    Target(
        name="capability",
        run=run_capability,
        words=_VERSION_WORDS,
        seeds=_texts("==9.0", "==10.* || >=8.0,<9.0", "9.0", "*"),
        longest=DESCRIPTOR_BYTES,
        share=100,
    ),
    Target(
        name="descriptor",
        run=run_descriptor,
        words=(*_keys(Descriptor), *_TOML, *_FEATURES, *_NAMES, *_VERSION_WORDS, *ODD),
        seeds=lambda: [_SMALL.encode(), *_files("backends/*/backend.toml")()],
        longest=DESCRIPTOR_BYTES,
        share=12,
    ),
    Target(
        name="table",
        run=run_table,
        words=(*_keys(Descriptor), *_JSON, *_FEATURES, *_NAMES, *_VERSION_WORDS, *ODD),
        seeds=_tables,
        longest=DESCRIPTOR_BYTES,
        share=40,
        json=True,
    ),
    Target(
        name="facts",
        run=run_facts,
        words=(*_keys(Facts), *_JSON, *_VERSION_WORDS, *ODD),
        seeds=_files("tests/facts/*.json"),
        longest=FILE_BYTES,
        share=25,
        json=True,
    ),
    Target(
        name="resolution",
        run=run_resolution,
        words=(*_keys(Call, Policy), *_JSON, *ODD),
        seeds=_resolutions,
        longest=FILE_BYTES,
        share=60,
        json=True,
    ),
    Target(
        name="agreement",
        run=run_agreement,
        words=(*_keys(Call, Policy), *_JSON, *ODD),
        seeds=_agreements,
        longest=FILE_BYTES,
        share=40,
        json=True,
    ),
    Target(
        name="record",
        run=run_record,
        words=(*_keys(Record), *_JSON, *_NAMES, *ODD),
        seeds=_texts(_RECORD),
        longest=FILE_BYTES,
        share=80,
        json=True,
    ),
    Target(
        name="profile",
        run=run_profile,
        words=(*_keys(Profile), *_JSON, *_NAMES, *_FEATURES, *ODD),
        seeds=_texts(_PROFILE),
        longest=PROFILE_BYTES,
        share=10,
        json=True,
    ),
    Target(
        name="lock",
        run=run_lock,
        words=(*_keys(Lock), *_JSON, *_NAMES, *_FEATURES, *ODD),
        seeds=_texts(_LOCK),
        longest=LOCK_BYTES,
        share=10,
        json=True,
    ),
    Target(
        name="environment",
        run=run_environment,
        words=(
            *VARIABLES,
            "=",
            "\n",
            ",",
            "off",
            "on",
            "1",
            "INFO",
            "KERNELREG_",
            "acme",
            "gdn.chunk=acme",
            *_NAMES,
            *ODD,
        ),
        seeds=_texts(
            "KERNELREG_BACKEND=gdn.chunk=acme,gdn.recurrent=torch\nKERNELREG_STRICT=1",
            "KERNELREG_PREFER=torch, acme\nKERNELREG_DISABLE=acme\nKERNELREG_LOG=info",
            "KERNELREG_PLUGINS=off\nKERNELREG_FACTS=/nowhere\nKERNELREG_FCTS=1\nKERNELREG_LOCK=a\nKERNELREG_PROFILE=off",
        ),
        longest=_ENVIRONMENT_BYTES,
        share=80,
    ),
    Target(
        name="nvcc",
        run=run_nvcc,
        words=("/", ":", "\n", "/nowhere", "nvcc", "bin", "~", ".", "..", " ", *ODD),
        seeds=_texts("/nowhere\n/nowhere/bin:/nowhere", "\n", "~/cuda\n:", "/nowhere/cuda \n/nowhere//bin:."),
        longest=_ENVIRONMENT_BYTES,
        share=5,
    ),
    Target(
        name="visible",
        run=run_visible,
        words=("GPU-", "MIG-", "GPU-a", "GPU-ab", "MIG-b0", "MIG-a1", ",", "-1", "0", "3", "99", " ", "+", "2x", *ODD),
        seeds=_texts("0,1", "GPU-c,2", "MIG-b0,MIG-b1", "-1", "", "0,x,1", "1,1", "GPU-a"),
        longest=_ENVIRONMENT_BYTES,
        share=300,
    ),
    Target(
        name="call",
        run=run_call,
        words=(
            *("=", "\n", "\ntokens=1", "\nheads=64", "\ndtype=float16", "\nhead_dim_k=128", "\nfeatures=varlen"),
            *Call.__struct_fields__,
            *_FEATURES,
            *_NAMES,
            *ODD,
        ),
        seeds=_texts("gdn\ncuda:0\ntokens=4096\ndtype=bfloat16\nfeatures=varlen", "gdn.recurrent\ncpu\nheads=4"),
        longest=_ENVIRONMENT_BYTES,
        share=80,
    ),
)

TARGETS = {each.name: each for each in _ALL}
