#!/usr/bin/env python3
"""Golden file of an expert in Marlin's layout; needs nothing but Python.

Written from the other end than kernels/marlin.c, which says for each word of the result where its codes
come from: here matrices are reshaped and permuted as a whole, as the engines that load checkpoints for
these kernels describe it (vLLM, SGLang: gptq_marlin_repack, marlin_permute_scales and the exchange that
MXFP4 scales get for 16-bit activations).

marlin_64x96.bin, bytes one after another, words little-endian:
    checkpoint order: gate, up, down, each codes [rows][K / 2] (low nibble first), scales [rows][K / 32]
    then twice, columns of gate and up one after the other, and interleaved:
    gate_up codes, gate_up scales, down codes, down scales
"""
import random
import struct
import sys

H, I = 64, 96


def flat(rows):
    return [value for row in rows for value in row]


def fragments():
    """For 16 x 64 codes as four blocks of 16 x 16, row by row: in which order they are packed.

    A tensor core's B operand: thread 4 c + t holds rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of column c, and of
    column c + 8; all four blocks of a thread follow each other."""
    order = []
    for thread in range(32):
        column, t = divmod(thread, 4)
        own = [16 * row + column + 8 * right
               for right in (0, 1) for row in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
        for block in range(4):
            order += [256 * block + own[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    return order


def pack_codes(w):
    """w[k][n]."""
    k, n, order, out = len(w), len(w[0]), fragments(), []
    for top in range(0, k, 16):
        blocks = []
        for left in range(0, n, 16):
            for row in w[top:top + 16]:
                blocks += row[left:left + 16]
        for chunk in range(0, len(blocks), 1024):
            permuted = [blocks[chunk + i] for i in order]
            for at in range(0, 1024, 8):
                out.append(sum(code << 4 * p for p, code in enumerate(permuted[at:at + 8])))
    return struct.pack("<%dI" % len(out), *out)


def pack_scales(s):
    """s[group of k][n]."""
    values, out = flat(s), []
    order = [i + 8 * j for i in range(8) for j in range(8)]
    for at in range(0, len(values), 64):
        out += [values[at + i] for i in order]
    for at in range(0, len(out), 4):
        out[at + 1], out[at + 2] = out[at + 2], out[at + 1]
    return bytes(out)


def transposed(rows):
    return [list(column) for column in zip(*rows)]


def main():
    draw = random.Random(20261201)
    codes, scales, out = {}, {}, b""
    for name, rows, columns in (("gate", I, H), ("up", I, H), ("down", H, I)):
        codes[name] = [[draw.randrange(16) for _ in range(columns)] for _ in range(rows)]
        scales[name] = [[draw.randrange(255) for _ in range(columns // 32)] for _ in range(rows)]
        out += bytes(row[i] | row[i + 1] << 4 for row in codes[name] for i in range(0, columns, 2))
        out += bytes(flat(scales[name]))
    for interleaved in (False, True):
        def both(of):
            if not interleaved:
                return of["gate"] + of["up"]
            return flat(zip(of["gate"], of["up"]))
        out += pack_codes(transposed(both(codes))) + pack_scales(transposed(both(scales)))
        out += pack_codes(transposed(codes["down"])) + pack_scales(transposed(scales["down"]))
    with open(sys.argv[1] if len(sys.argv) > 1 else "marlin_64x96.bin", "wb") as file:
        file.write(out)


main()
