"""What a compiled program sends between devices, read from its text with the trip counts of its loops."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (?P<result>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BOUND = re.compile(r"= s(?:32|64)\[\]\S* constant\((\d+)\)")
_CONDITION = re.compile(r"\bcondition=%([\w.-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Collective:
    """All collectives of one kind in one call of a program.

    num_bytes: of what each device has of them, summed up: of an all-gather the whole, of a reduce-scatter its part.
    """

    kind: str
    count: int
    num_bytes: int


def collectives(text: str) -> tuple[Collective, ...]:
    """Those of a compiled program (jax.stages.Compiled.as_text()), in the order of KINDS.

    A loop counts as often as the compiler says, else as its condition bounds it.
    """
    computations, entry = _computations(text)
    counts, sizes = Counter[str](), Counter[str]()
    for name, calls in _num_calls(computations, entry).items():
        for line in computations[name]:
            if found := _COLLECTIVE.search(line):
                counts[found["kind"]] += calls
                repeats = found["start"] is not None and found["kind"] != "all-reduce"
                sizes[found["kind"]] += calls * _result_bytes(found["result"], repeats_operands=repeats)
    return tuple(Collective(kind, counts[kind], sizes[kind]) for kind in KINDS if counts[kind])


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation by name, and which one the program begins with."""
    found: dict[str, list[str]] = {}
    entry = ""
    lines: list[str] = []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            lines = found.setdefault(head["name"], [])
            entry = head["name"] if head["entry"] else entry
        else:
            lines.append(line)
    return found, entry


def _num_calls(computations: dict[str, list[str]], entry: str) -> Counter[str]:
    """How often each computation runs in one call of the program."""
    calls = Counter({entry: 1})
    for name in _callers_first(computations, entry):
        for line in computations[name]:
            times = calls[name] * _trips(line, computations)
            for called in _callees(line):
                calls[called] += times
    return calls


def _callers_first(computations: dict[str, list[str]], entry: str) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for line in computations[name]:
                for called in _callees(line):
                    visit(called)
            order.append(name)

    visit(entry)
    return order[::-1]


def _callees(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in names.split(","))


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """Of a loop: what the compiler knows, else the bound in its condition (JAX counts from 0); of anything else 1."""
    condition = _CONDITION.search(line)
    if condition is None:
        return 1
    if known := _TRIPS.search(line):
        return int(known[1])
    return max(_bounds(condition[1], computations), default=1)


def _bounds(name: str, computations: dict[str, list[str]]) -> Iterator[int]:
    """The whole numbers in a condition, and in the fusions that it is made of."""
    for line in computations[name]:
        yield from map(int, _BOUND.findall(line))
        for called in _callees(line):
            yield from _bounds(called, computations)


def _result_bytes(result: str, *, repeats_operands: bool) -> int:
    """Of the shapes of an instruction's result, without the operands that an asynchronous start repeats before it."""
    arrays = [(kind, [int(n) for n in sizes.split(",") if n]) for kind, sizes in _ARRAY.findall(result)]
    if repeats_operands:
        arrays = [(kind, shape) for kind, shape in arrays if shape or kind != "u32"]  # without the handles
        arrays = arrays[len(arrays) // 2 :]
    return sum(math.prod(shape) * _bits(kind) for kind, shape in arrays) // 8


def _bits(kind: str) -> int:
    """s32, bf16, f8e4m3fn: the first number; pred has a byte."""
    found = _BITS.search(kind)
    return int(found[0]) if found else 8
