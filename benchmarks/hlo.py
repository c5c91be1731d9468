"""Bytes that a compiled TPU graph reads and writes in HBM, by operation, from the text of its HLO.

The text says where each array lies and how it is padded:

    %fusion.7 = bf16[32,16,64,256]{0,1,3,2:T(8,128)(2,1)S(1)} fusion(%copy-done.3, %Arg_2.1), kind=kLoop,
    calls=%computation.7

{0,1,3,2} are the dimensions, the fastest first; T(8,128) pads the fastest two to tiles of 8 x 128; S(1) is
VMEM, and HBM has no S. (XLA's own "bytes accessed" adds up all memory spaces, so that a copy from HBM to VMEM
counts three times with its use.)"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

V5E_BANDWIDTH = 819e9  # bytes per second of one chip's HBM, by Google Cloud's page "TPU v5e"
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*):?([^}]*)\})?")
COMPUTATION = re.compile(r"(ENTRY )?%([\w.-]+) .*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)(, [a-z]\w*=.*)?$")
# They name, group or reinterpret what is there already; so do XLA's own custom calls for 64-bit integers and
# bitcasts.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier")
FREE_CALLS = ("X64Combine", "X64SplitLow", "X64SplitHigh", "ConcatBitcast", "AllocateBuffer")
SLICES = ("slice", "dynamic-slice", "gather", "slice-start")


class Array(NamedTuple):
    """nbytes: with the padding."""

    elements: int
    nbytes: float
    in_hbm: bool


class Instruction(NamedTuple):
    """arrays: of the result. operands: names; of a parameter, its number. attributes: the text behind the
    operands."""

    name: str
    opcode: str
    arrays: list[Array]
    operands: list[str]
    attributes: str
    is_root: bool

    def attribute(self, pattern: str) -> str:
        """Return what the first group of a pattern matches in the attributes, or ""."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


def nbytes(text: str) -> float:
    """Return the HBM bytes of one run of a graph, given as the text of its module."""
    return sum(nbytes for _, nbytes in operations(text))


def operations(text: str) -> list[tuple[str, float]]:
    """Return (name, HBM bytes in one run of the graph) of each operation of a module, given as text. A loop
    counts once where the text has no trip count."""
    computations, entry = parse(text)
    return list(_operations(computations, entry, 1))


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str | None]:
    """Return (computation -> name -> Instruction, name of the entry computation)."""
    computations, entry = {}, None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if found := COMPUTATION.match(line):
            body = computations[found[2]] = {}
            entry = found[2] if found[1] else entry
        elif found := INSTRUCTION.match(line):
            root, name, shape, opcode, operands, attributes = found.groups()
            names = re.findall(r"%([\w.-]+)", operands) or [operands]
            body[name] = Instruction(name, opcode, parse_arrays(shape), names, attributes or "", bool(root))
    return computations, entry


def parse_arrays(shape: str) -> list[Array]:
    """Return those of the text of a shape, or of a tuple of them."""
    found = []
    for dtype, dims, order, layout in ARRAY.findall(shape):
        dims = [int(size) for size in dims.split(",") if size]
        padded = [dims[int(i)] for i in order.split(",") if i] or list(dims)
        tile = re.search(r"T\(([\d,]+)\)", layout)
        tile = [int(size) for size in tile[1].split(",")][::-1] if tile else []
        padded += [1] * (len(tile) - len(padded))
        for i, size in enumerate(tile):
            padded[i] = math.ceil(padded[i] / size) * size
        bits = re.search(r"\d+", dtype)  # none: pred, a byte
        nbytes = math.prod(padded) * (int(bits[0]) if bits else 8) / 8
        space = re.search(r"S\((\d+)\)", layout)  # 1 is VMEM, the others are scalar memory and semaphores
        found.append(Array(math.prod(dims), nbytes, space is None or space[1] == "0"))
    return found


def _operations(computations, name, times) -> Iterator[tuple[str, float]]:
    body = computations[name]
    for one in body.values():
        if one.opcode == "while":
            trips = one.attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1
            yield from _operations(computations, one.attribute(r"body=%([\w.-]+)"), times * int(trips))
        elif one.opcode == "call":
            yield from _operations(computations, one.attribute(r"to_apply=%([\w.-]+)"), times)
        elif not _is_free(one):
            moved = [*_reads(computations, body, one), *_writes(computations, body, one)]
            yield one.name, times * sum(share * array.nbytes for array, share in moved if array.in_hbm)


def _is_free(one):
    called = one.attribute(r'custom_call_target="([^"]*)"')
    return one.opcode in FREE or called in FREE_CALLS or one.opcode.endswith("-done")


def _reads(computations, body, one):
    """Generate (Array, share of it that an instruction reads), each operand once."""
    for name in dict.fromkeys(one.operands):
        if name in body:
            share = _share_read(computations, body[name], one)
            yield from ((array, share) for array in body[name].arrays)


def _share_read(computations, operand, user):
    """Return what share of an operand an instruction reads: of a slice its own size, of a fusion what it does
    with the operand."""
    if user.opcode in SLICES and user.operands[0] == operand.name:
        result = user.arrays[1] if user.opcode == "slice-start" else user.arrays[0]
        return result.elements / operand.arrays[0].elements
    if user.opcode == "dynamic-update-slice" and user.operands[0] == operand.name:
        return 0  # it is changed in place
    called = computations.get(user.attribute(r"calls=%([\w.-]+)"))
    if called is None:
        return 1
    share = 0
    for inner in called.values():
        if inner.opcode == "parameter" and user.operands[int(inner.operands[0])] == operand.name:
            users = [other for other in called.values() if inner.name in other.operands]
            share += sum(_share_read(computations, inner, other) for other in users)
    return min(share, 1)


def _writes(computations, body, one):
    """Return [(Array, share of it that an instruction writes)]: all, but of an array that is changed in place
    the update's share."""
    arrays = list(one.arrays)
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        # Its result names its operands too.
        for array in (array for name in one.operands for array in body[name].arrays):
            arrays.remove(array)
    shares = [1] * len(arrays)
    called = computations.get(one.attribute(r"calls=%([\w.-]+)"), body)
    root = one if called is body else next(inner for inner in called.values() if inner.is_root)
    parts = [called[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for i, part in enumerate(parts):
        if part.opcode == "dynamic-update-slice":
            shares[i] = called[part.operands[1]].arrays[0].elements / part.arrays[0].elements
    return zip(arrays, shares)
