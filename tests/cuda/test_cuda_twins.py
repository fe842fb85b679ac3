"""What host and device must agree on: the argument struct, the flags, the kernels' forms."""

from __future__ import annotations

import re
import struct

from rapidkda.backends.cuda import compiler
from rapidkda.backends.cuda.host import neighbours, params, schedule, step_params
from rapidkda.backends.cuda.host.params import ADDRESSES, Constants, Flags

HEADER = (compiler.SOURCES / "params.cuh").read_text()
STEP_HEADER = (compiler.SOURCES / "step_params.cuh").read_text()
KINDS = {"i64": "q", "int": "i", "u32": "I", "float": "f"}


def test_flags_have_the_values_of_the_header() -> None:
    device = {name: 1 << int(bit) for name, bit in re.findall(r"k(\w+) = 1u << (\d+)", HEADER)}
    host = {
        "".join(word.capitalize() for word in name.split("_")): value
        for name, value in vars(Flags).items()
        if name.isupper()
    }
    assert {name.lower(): value for name, value in host.items()} == {n.lower(): v for n, v in device.items()}
    assert len(device) == 15


def test_fields_have_the_order_and_types_of_the_header() -> None:
    body = re.search(r"struct Params \{(.*?)\n\};", HEADER, re.DOTALL)
    assert body is not None
    fields: list[tuple[str, str]] = []
    for declaration in re.sub(r"//[^\n]*", "", body[1]).split(";"):
        words = declaration.split()
        if not words or (words[0] in ("TensorMap", "u16", "Share") and "*" not in declaration):
            continue
        pointer = "*" in declaration
        kind = "Q" if pointer else KINDS[words[0]]
        names = declaration.replace("const", "").replace("*", " ").split(maxsplit=1)[1]
        fields += [(name.strip().rstrip("_"), kind) for name in names.split(",")]
    assert [name for name, _ in fields] == [*ADDRESSES, *Constants._fields]
    addresses = params.addresses([True] * len(ADDRESSES)).format
    assert addresses == "<512s" + "Q" * len(ADDRESSES)
    assert [kind for _, kind in fields[: len(ADDRESSES)]] == ["Q"] * len(ADDRESSES)
    assert params._CONSTANTS.format == "<" + _packed([kind for _, kind in fields[len(ADDRESSES) :]]) + "128s768s"


def _packed(kinds: list[str]) -> str:
    """Run lengths of struct codes, as a format string."""
    runs = re.findall(r"((.)\2*)", "".join(kinds))
    return "".join(f"{len(run) if len(run) > 1 else ''}{kind}" for run, kind in runs)


def test_the_packed_struct_has_the_size_that_the_header_asserts() -> None:
    size = re.search(r"sizeof\(Params\) == (\d+)", HEADER)
    assert size is not None
    assert int(size[1]) == params.SIZE
    maps_and_addresses = params.addresses([True] * len(ADDRESSES)).size
    assert params.SIZE - 64 < maps_and_addresses + params._CONSTANTS.size <= params.SIZE
    assert len(params.pack(Constants(*range(len(Constants._fields))), b"", b"")) == params.SIZE
    assert struct.calcsize("<128s") == 2 * params.ORDER_ENTRIES
    assert f"kOrderEntries = {params.ORDER_ENTRIES};" in HEADER
    assert struct.calcsize("<768s") == schedule.SHARES * schedule._SHARE.size
    assert f"kShares = {schedule.SHARES};" in HEADER
    share = re.search(r"struct Share \{\n(.*?)\n\};", HEADER, re.DOTALL)
    assert share is not None
    assert share[1].split() == ["u16", "segment,", "head;", "u8", "first,", "workers;", "u16", "reserved;"]
    assert schedule._SHARE.format == "<HHBBH"


def test_the_second_struct_has_the_fields_that_the_host_packs() -> None:
    header = (compiler.SOURCES / "neighbours.cuh").read_text()
    flags = {name: 1 << int(bit) for name, bit in re.findall(r"k(\w+) = 1u << (\d+)", header)}
    host = {name.replace("_", "").lower(): value for name, value in vars(neighbours.Flags).items() if name.isupper()}
    assert host == {name.lower(): value for name, value in flags.items()}
    body = re.search(r"struct Neighbours \{(.*?)\n\};", header, re.DOTALL)
    assert body is not None
    constants = maps = addresses = ""
    for declaration in re.sub(r"//[^\n]*", "", body[1]).split(";"):
        words = declaration.split()
        if not words:
            continue
        count = declaration.count(",") + 1
        if "*" in declaration:
            addresses += "Q"
        elif words[0] == "TensorMap":
            maps += "m" * count
        else:
            constants += KINDS[words[0]] * count
    assert neighbours._CONSTANTS.format == "<" + _packed(list(constants))
    assert neighbours._CONSTANTS.size <= neighbours.MAPS_AT
    assert neighbours.layout([True] * len(addresses)).startswith("512s" + addresses)
    assert struct.calcsize("<" + neighbours.layout([False] * len(addresses))) == neighbours.SIZE - neighbours.MAPS_AT
    assert len(maps) == 4
    assert neighbours.SIZE - 64 < neighbours.MAPS_AT + 512 + 8 * len(addresses) <= neighbours.SIZE
    assert f"sizeof(Neighbours) == {neighbours.SIZE}" in header


def test_the_flags_of_a_step_have_the_values_of_the_header() -> None:
    device = {name.lower(): 1 << int(bit) for name, bit in re.findall(r"k(\w+) = 1u << (\d+)", STEP_HEADER)}
    host = {name.replace("_", "").lower(): value for name, value in vars(step_params.Flags).items() if name.isupper()}
    assert host == device
    assert len(device) == 12


def test_the_fields_of_a_step_have_the_order_and_types_of_the_header() -> None:
    body = re.search(r"struct StepParams \{(.*?)\n\};", STEP_HEADER, re.DOTALL)
    assert body is not None
    fields: list[tuple[str, str]] = []
    for declaration in re.sub(r"//[^\n]*", "", body[1]).split(";"):
        words = declaration.split()
        if words:
            kind = "Q" if "*" in declaration else KINDS[words[0]]
            names = declaration.replace("const", "").replace("*", " ").split(maxsplit=1)[1]
            fields += [(name.strip(), kind) for name in names.split(",")]
    count = len(step_params.ADDRESSES)
    assert [name for name, _ in fields] == [*step_params.ADDRESSES, *step_params.Constants._fields]
    assert "".join(kind for _, kind in fields[:count]) == "Q" * count
    assert step_params.addresses([True] * count).format == "<" + "Q" * count
    assert step_params._CONSTANTS.format == "<" + _packed([kind for _, kind in fields[count:]])
    assert len(step_params.pack(step_params.Constants())) == step_params.SIZE
    assert f"sizeof(StepParams) == {step_params.SIZE}" in STEP_HEADER
