#!/usr/bin/env python3
"""safetensors_differ.py ANSWER NUMOE: our reader beside the official safetensors library.

Sound files are damaged in many ways, from a fixed seed. Every file that the library refuses must be
refused by ours; where both accept one, they must see the same tensors. And the library opens all
that `numoe synth` writes. Without the library: 77, a skip. SPDX-License-Identifier: Apache-2.0
"""

import glob
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

try:
    import numpy  # noqa: F401  (the library's framework for opening)
    from safetensors import safe_open
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

ROUNDS = 8000
answer_program, numoe = sys.argv[1:3]
work = tempfile.TemporaryDirectory()
program = subprocess.Popen([answer_program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ours(path):
    program.stdin.write(path.encode() + b"\n")
    program.stdin.flush()
    return program.stdout.readline().decode(errors="replace").rstrip("\n").split("\t")


def theirs(path):
    """Names, types and shapes, or None when it is refused."""
    try:
        with safe_open(path, framework="np") as file:
            return sorted(
                f"{name} {file.get_slice(name).get_dtype()} {list(file.get_slice(name).get_shape())}"
                for name in file.keys()
            )
    except Exception:
        return None


def frame(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def sound(rng):
    """A file of a few tensors."""
    types = {"F32": 4, "BF16": 2, "U8": 1, "I8": 1, "F8_E8M0": 1, "I64": 8, "F16": 2, "BOOL": 1}
    header, at = {}, 0
    if rng.random() < 0.5:
        header["__metadata__"] = {"format": "pt"}
    for i in range(rng.randrange(1, 5)):
        kind = rng.choice(list(types))
        shape = [rng.choice([0, 1, 2, 3, 8, 32]) for _ in range(rng.randrange(0, 4))]
        size = types[kind]
        for d in shape:
            size *= d
        header[f"t{i}.weight"] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header, bytes(at)


def damage_entry(rng, header):
    """One number, type or key of one tensor."""
    names = [name for name in header if name != "__metadata__"]
    entry = header[rng.choice(names)]
    odd = [0, 1, -1, 2, 7, 64, 2**31, 2**32, 2**63, 2**64, 1.5, "1", None, True, [], {}]
    what = rng.randrange(8)
    if what == 0:
        entry["data_offsets"][rng.randrange(2)] = rng.choice(odd)
    elif what == 1:
        entry["data_offsets"] = rng.choice([[], [0], [0, 4, 8], None, "x", {}])
    elif what == 2 and entry["shape"]:
        entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(odd)
    elif what == 3:
        entry["shape"] = rng.choice(
            [None, "x", {}, [2**40, 2**40], [0, 2**63, 2**63], [2**32, 2**32], [2**63, 2]]
            + [[2**64 - 1], [2**62, 4, 1], [2**61], [2**60, 0], [1] * 40]
        )
    elif what == 4:
        entry["dtype"] = rng.choice(["F31", "", None, 4, "f32", "F4", "F64", "U16"])
    elif what == 5:
        del entry[rng.choice(list(entry))]
    elif what == 6:
        header["__metadata__"] = rng.choice([{}, {"a": 1}, [], "x", {"a": None}, {"a": "b"}])
    else:
        entry["more"] = rng.choice(odd)
    return header


def damage_bytes(rng, data):
    """Bytes of a file changed, cut off, put in, or its header's length changed."""
    data = bytearray(data)
    what = rng.randrange(6)
    if what == 0:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif what == 1:
        del data[rng.randrange(len(data)) :]
    elif what == 2:
        at = rng.randrange(len(data) + 1)
        data[at:at] = bytes(rng.choice(b' {}[]:,"0\x00\xff') for _ in range(rng.randrange(1, 9)))
    elif what == 3:
        n = struct.unpack_from("<Q", data)[0] + rng.choice([-2, -1, 1, 2, 2**32, 2**63])
        struct.pack_into("<Q", data, 0, n % 2**64)
    elif what == 4:
        data[0:8] = rng.choice([b"\xff" * 8, b"\xfb" + b"\xff" * 7, bytes(8), bytes(7) + b"\x80"])
    else:
        data += bytes(rng.randrange(1, 9))
    return bytes(data)


def overflow(rng):
    """A shape whose elements, or bytes, are as many as the offsets say, but for 2**64 of them."""
    kind, size = rng.choice([("F64", 8), ("F32", 4), ("F16", 2), ("U8", 1)])
    shape = rng.choice([[2**32, 2**32], [2**63, 2], [2**64 // size], [2**62, 4], [3, 2**63, 2]])
    end = rng.choice([0, 8, 2**64, 2**64 - 8])
    begin = rng.choice([0, 8, end])
    entry = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    return frame({"t": entry}, bytes(rng.choice([0, 8])))


def nested(rng, header, data):
    """A value in the place of another, many levels deep, or as large as a number can be."""
    depth = rng.choice([1, 60, 120, 124, 125, 126, 127, 128, 129, 130, 1000, 100000])
    begin, end = rng.choice([("[", "]"), ('{"a":', "}")])
    value = rng.choice(
        [begin * depth + "1" + end * depth, begin * depth, "[" * depth + "]" * (depth - 1)]
        + ["1e400", "1" * 400, "18446744073709551616", "-0", "0.0", "1e2", "00", "1."]
    )
    mark = "the value"
    place = rng.randrange(4)
    name = next(name for name in header if name != "__metadata__")
    if place == 0:
        header[name]["more"] = mark
    elif place == 1:
        header[name]["shape"] = [mark]
    elif place == 2:
        header["__metadata__"] = {"a": mark}
    else:
        header[name]["data_offsets"] = [0, mark]
    return frame(json.dumps(header).replace(f'"{mark}"', value).encode(), data)


def damaged(rng):
    header, data = sound(rng)
    what = rng.randrange(7)
    if what == 5:
        return overflow(rng)
    if what == 6:
        return nested(rng, header, data)
    if what == 0:
        return frame(header, data)
    if what == 1:
        return frame(damage_entry(rng, header), data)
    if what == 2:  # a key twice
        text = json.dumps(header)
        name = next(name for name in header if name != "__metadata__")
        return frame((text[:-1] + f', "{name}": {json.dumps(header[name])}}}').encode(), data)
    if what == 3:  # spaces around
        text = json.dumps(header).encode()
        return frame(rng.choice([text + b"   ", b" " + text, text + b"\n", text + b"x"]), data)
    return damage_bytes(rng, frame(header, data))


def tensors_of(line):
    return sorted(" ".join(part.rsplit(" ", 1)[:1]) for part in line[1:])


failures = refused = both = stricter = 0
rng = random.Random(20260107)
path = os.path.join(work.name, "t.safetensors")
for number in range(ROUNDS):
    content = damaged(rng)
    with open(path, "wb") as file:
        file.write(content)
    want, got = theirs(path), ours(path)
    if got[0] not in ("ok", "no"):
        print(f"failed: {number}: no answer: {got} for {content!r}")
        sys.exit(1)
    if want is None:
        refused += 1
        if got[0] == "ok":
            failures += 1
            print(f"failed: {number}: the library refuses what ours accepts: {content!r}")
    elif got[0] == "ok":
        both += 1
        if tensors_of(got) != want:
            failures += 1
            print(f"failed: {number}: {tensors_of(got)} where {want} is right")
    else:
        stricter += 1

models = 0
for model in ("v4-flash", "kimi-k3", "gpt-oss-20b"):
    directory = os.path.join(work.name, model)
    subprocess.run(
        [numoe, "synth", "--model", model, "--layers", "1", "--experts", "2", directory],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    for shard in sorted(glob.glob(directory + "/*.safetensors")):
        models += 1
        if theirs(shard) is None or tensors_of(ours(shard)) != theirs(shard):
            failures += 1
            print(f"failed: {shard} is not what the library sees")

print(f"{both} alike, {refused} refused by both, {stricter} refused by ours alone, "
      f"{models} files of synth, {failures} failures")
enough = both > ROUNDS // 20 and refused > ROUNDS // 4 and models >= 3
sys.exit(1 if failures or not enough else 0)
