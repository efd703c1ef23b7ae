#!/usr/bin/env python3
"""Write the golden files beside this script: small checkpoints, inputs, and what torch says.

Independent of numoe's C code: MXFP4 is quantised and decoded here in torch from the OCP
Microscaling definition (E2M1 elements, one E8M0 scale for 32 of them), files are written by the
safetensors library, and the experts are computed in torch in float64 from the decoded weights.

    python make_golden.py [DIRECTORY]      default: the directory of this script

Every number comes from one seeded generator a set, so a second run writes the same bytes; see
README.md for the versions that the committed files were made with.

SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import struct
import sys

import safetensors.torch
import torch

GROUP = 32
# OCP E2M1: sign, two exponent bits (bias 1), one mantissa bit. Code 8 is -0.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1_EMAX = 2
E8M0_BIAS = 127


# ---- MXFP4 --------------------------------------------------------------------------------------


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code, ties to the even code, saturating at 6."""
    magnitude = values.abs()
    # Between neighbours i and i + 1 the tie goes to the even index: up when i is odd.
    code = torch.zeros(values.shape, dtype=torch.uint8)
    for i in range(7):
        middle = (E2M1[i] + E2M1[i + 1]) / 2
        above = magnitude >= middle if i % 2 else magnitude > middle
        code = torch.where(above, torch.tensor(i + 1, dtype=torch.uint8), code)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def quantise(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] float64 -> codes [..., K] and scale bytes [..., K/32], by OCP's own rule:
    the scale is the largest power of two not above amax, divided by that of the largest element."""
    groups = weights.reshape(*weights.shape[:-1], -1, GROUP)
    amax = groups.abs().amax(-1)
    exponent = torch.frexp(amax).exponent - 1 - E2M1_EMAX
    exponent = torch.where(amax > 0, exponent, torch.tensor(-E8M0_BIAS, dtype=exponent.dtype))
    exponent = exponent.clamp(-E8M0_BIAS, E8M0_BIAS)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    codes = e2m1_codes(scaled).reshape(weights.shape)
    return codes, (exponent + E8M0_BIAS).to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes and scale bytes -> float64, exactly."""
    assert not (scales == 255).any(), "scale byte 255 is NaN"
    sign = 1 - 2 * (codes >> 3).to(torch.float64)
    groups = (sign * E2M1[(codes & 7).long()]).reshape(*codes.shape[:-1], -1, GROUP)
    exponent = scales.to(torch.int32) - E8M0_BIAS
    return torch.ldexp(groups, exponent.unsqueeze(-1)).reshape(codes.shape)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [..., K/2]: column 2i in the low nibble of byte i, 2i + 1 in the high one."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def check_formats() -> None:
    """The quantiser against the definition, before anything is written with it."""
    table = torch.cat([E2M1, -E2M1])
    assert torch.equal(e2m1_codes(table), torch.arange(16, dtype=torch.uint8))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0], dtype=torch.float64)
    assert e2m1_codes(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    one = torch.zeros(GROUP, dtype=torch.float64)
    one[3] = 7.5
    codes, scales = quantise(one)
    assert scales.tolist() == [127] and codes[3] == 7
    one[3] = 8
    codes, scales = quantise(one)
    assert scales.tolist() == [128] and codes[3] == 6
    vector = bytes.fromhex("1032547698BADCFE") * 2
    codes = torch.tensor([n for b in vector for n in (b & 15, b >> 4)], dtype=torch.uint8)
    assert bytes(pack_nibbles(codes).tolist()) == vector
    assert torch.equal(decode(codes, torch.tensor([127], dtype=torch.uint8)), table.repeat(2))
    # torch's own E8M0 type must mean the same powers of two, both ends included.
    exponents = torch.arange(255, dtype=torch.uint8)
    theirs = exponents.view(torch.float8_e8m0fnu).to(torch.float32).to(torch.float64)
    assert torch.equal(theirs, torch.ldexp(torch.ones(255, dtype=torch.float64),
                                           exponents.to(torch.int32) - E8M0_BIAS))


# ---- experts ------------------------------------------------------------------------------------


def silu(g, u):
    return g * torch.sigmoid(g) * u


def silu_clamped(g, u, limit=10.0):
    return silu(g.clamp(max=limit), u.clamp(-limit, limit))


def swiglu_oai(g, u, alpha=1.702, limit=7.0):
    # The C structure holds alpha as a float: so does this.
    alpha = float(torch.tensor(alpha, dtype=torch.float32))
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + 1)


def situ(g, u, gate_cap=4.0, up_cap=25.0):
    return gate_cap * torch.tanh(g / gate_cap) * torch.sigmoid(g) * up_cap * torch.tanh(u / up_cap)


ACTIVATIONS = {"silu": silu, "silu_clamped": silu_clamped, "swiglu_oai": swiglu_oai, "situ": situ}


class Matrix:
    """One quantised matrix [N, K]; float64 in, codes, scale bytes and decoded values kept."""

    def __init__(self, weights: torch.Tensor):
        self.codes, self.scales = quantise(weights)
        self.value = decode(self.codes, self.scales)

    @property
    def packed(self) -> torch.Tensor:
        return pack_nibbles(self.codes).contiguous()


class Expert:
    def __init__(self, gate, up, down, biases=None):
        self.gate, self.up, self.down = Matrix(gate), Matrix(up), Matrix(down)
        self.biases = biases  # None or bf16 tensors (gate [I], up [I], down [H])

    def preactivations(self, x):
        g, u = x @ self.gate.value.T, x @ self.up.value.T
        if self.biases:
            g, u = g + self.biases[0].to(torch.float64), u + self.biases[1].to(torch.float64)
        return g, u

    def output(self, x, activation, round_h=lambda h: h):
        h = round_h(activation(*self.preactivations(x)))
        y = h @ self.down.value.T
        return y + self.biases[2].to(torch.float64) if self.biases else y


def layer_output(experts, x, ids, weights, activation, prepare=lambda x: x, round_h=lambda h: h):
    """out[t] = sum over the kept slots of weight * expert(x[t]), in float64."""
    x = prepare(x.to(torch.float64))
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if expert >= 0:
                y = experts[expert].output(x[token : token + 1], activation, round_h)[0]
                out[token] += float(weights[token, slot]) * y
    return out


def int8_groups(v):
    """What a mode with int8 activations does to a vector at best: for the report only."""
    groups = v.reshape(*v.shape[:-1], -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (torch.round(groups / scale) * scale).reshape(v.shape)


def bf16(v):
    return v.to(torch.float32).to(torch.bfloat16).to(torch.float64)


def relative(a, b):
    return float((a - b).norm() / b.norm())


# ---- random material ----------------------------------------------------------------------------


class Random:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def matrix(self, rows, columns, gain):
        """Normal weights whose size varies by row and by group, so that scale bytes spread."""
        spread = torch.exp2(self.normal(rows, columns // GROUP) * 0.7).repeat_interleave(GROUP, 1)
        rms = spread.square().mean().sqrt()
        return self.normal(rows, columns) * spread / rms * gain / columns**0.5

    def routing(self, tokens, experts, top_k, factor, id_type):
        scores = torch.rand(tokens, experts, generator=self.generator, dtype=torch.float64)
        chosen = scores.topk(top_k)
        ids = chosen.indices.clone()
        weights = (chosen.values / chosen.values.sum(-1, keepdim=True) * factor).to(torch.float32)
        # Entries of other devices and padding rows; their weights are rubbish on purpose.
        ids[2, 0] = -1
        ids[5, top_k - 1] = -1
        ids[7, :] = -1
        ids[11, 0 : top_k - 1] = -1
        weights[ids < 0] = float("nan")
        # No router repeats an id, but it must add up.
        ids[9, :] = ids[9, 0].clone()
        return ids.to(id_type), weights


# ---- writing ------------------------------------------------------------------------------------


class Golden:
    """Sets of golden data and the manifest that says where each piece lies.

    Lines:  set SET key value ...           sizes of a set
            data SET.NAME FILE OFFSET BYTES little-endian bytes, in SET.bin or inside a
                                            safetensors file: the reader needs no parser
    """

    def __init__(self, root: pathlib.Path):
        self.root, self.lines, self.report = root, [], []

    def begin(self, name, **keys):
        (self.root / name).mkdir(parents=True, exist_ok=True)
        self.name, self.blob = name, b""
        self.lines.append(f"set {name} " + " ".join(f"{k} {v}" for k, v in keys.items()))

    def raw(self, data, tensor):
        tensor = tensor.contiguous()
        content = tensor.view(torch.uint8).numpy().tobytes()
        offset = len(self.blob)
        self.lines.append(f"data {self.name}.{data} {self.name}.bin {offset} {len(content)}")
        self.blob += content

    def end(self):
        (self.root / f"{self.name}.bin").write_bytes(self.blob)

    def safetensors(self, file, tensors, listed):
        path = self.root / self.name / file
        safetensors.torch.save_file(tensors, str(path), metadata={"format": "pt"})
        content = path.read_bytes()
        (header_bytes,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + header_bytes])
        for tensor, entry in header.items():
            if tensor != "__metadata__" and listed(tensor):
                begin, end = entry["data_offsets"]
                self.lines.append(
                    f"data {self.name}.{tensor} {self.name}/{file} "
                    f"{8 + header_bytes + begin} {end - begin}"
                )

    def json(self, file, value):
        (self.root / self.name / file).write_text(json.dumps(value, indent=2) + "\n")

    def outputs(self, layer, experts, x, ids, weights, kinds, native):
        """Record torch's outputs for some activations; check that the clamps take part."""
        rows = [t for t in range(ids.shape[0]) if (ids[t] >= 0).any()]
        for kind in kinds:
            y = layer_output(experts, x, ids, weights, ACTIVATIONS[kind])
            self.raw(f"y.{layer}.{kind}", y.to(torch.float32))
            fast, exact = (layer_output(experts, x, ids, weights, ACTIVATIONS[kind], f, f)
                           for f in (int8_groups, bf16))
            worst = max(relative(fast[t], y[t]) for t in rows)
            self.report.append(
                f"{self.name} layer {layer} {kind}: relative L2 of ideal int8 groups "
                f"{relative(fast, y):.2e} (worst token {worst:.2e}), "
                f"of bf16 x and h {relative(exact, y):.2e}"
            )
        if native:
            unclamped = layer_output(experts, x, ids, weights,
                                     silu if native == "silu_clamped" else
                                     lambda g, u: swiglu_oai(g, u, limit=1e30))
            clamped = layer_output(experts, x, ids, weights, ACTIVATIONS[native])
            difference = relative(unclamped, clamped)
            assert difference > 0.1, "the clamps do not matter: raise the gains"
            self.report.append(
                f"{self.name} layer {layer} {native}: without clamps relative L2 {difference:.2f}"
            )


def make_v4(golden, name, seed, hidden, intermediate, layers, experts, top_k, tokens, draft,
            id_type, all_kinds):
    """DeepSeek-V4-Flash's layout: two shards, an index, config.json."""
    random = Random(seed)
    golden.begin(name, hidden=hidden, intermediate=intermediate, layers=layers, experts=experts,
                 top_k=top_k, tokens=tokens, id_bytes=torch.iinfo(id_type).bits // 8)
    golden.json("config.json", {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": int(draft),
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "expert_dtype": "fp4",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    })
    shards = ({}, {})
    model = []
    for layer in range(layers + int(draft)):
        prefix = f"layers.{layer}" if layer < layers else f"mtp.{layer - layers}"
        stem = f"{prefix}.ffn"
        row = []
        for e in range(experts):
            expert = Expert(random.matrix(intermediate, hidden, 7),
                            random.matrix(intermediate, hidden, 7),
                            random.matrix(hidden, intermediate, 1))
            if e == 0:  # A group of zeros: scale byte 0 by this quantiser, and harmless.
                expert.gate.codes[1, 0:GROUP] = 0
                expert.gate.scales[1, 0] = 0
                expert.gate.value = decode(expert.gate.codes, expert.gate.scales)
            row.append(expert)
            # An expert's tensors lie in both shards for half of the experts.
            for i, (tensor, matrix) in enumerate(
                    (("w1", expert.gate), ("w3", expert.up), ("w2", expert.down))):
                shard = shards[(e + (i if e % 2 else 0)) % 2]
                shard[f"{stem}.experts.{e}.{tensor}.weight"] = matrix.packed.view(torch.int8)
                shard[f"{stem}.experts.{e}.{tensor}.scale"] = \
                    matrix.scales.view(torch.float8_e8m0fnu)
        model.append(row)
        # What else a layer holds, and a loader of routed experts must leave alone.
        shards[0][f"{stem}.gate.weight"] = random.normal(experts, hidden).to(torch.bfloat16)
        shards[1][f"{stem}.gate.bias"] = random.normal(experts).to(torch.float32)
        shards[1][f"{stem}.shared_experts.w1.weight"] = \
            random.normal(32, hidden).to(torch.float8_e4m3fn)
        shards[1][f"{stem}.shared_experts.w1.scale"] = \
            torch.full((1, 1), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight_map, total = {}, 0
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        golden.safetensors(file, shard, lambda t: t.startswith("layers.") and ".experts." in t)
        for tensor, value in shard.items():
            weight_map[tensor] = file
            total += value.numel() * value.element_size()
    golden.json("model.safetensors.index.json", {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    })
    # Token sizes differ by an order of magnitude: some never reach the clamps, some always do.
    x = random.normal(tokens, hidden) * torch.exp2(random.normal(tokens, 1) * 0.8)
    x = x.to(torch.bfloat16)
    ids, weights = random.routing(tokens, experts, top_k, 1.5, id_type)
    golden.raw("x", x)
    golden.raw("ids", ids)
    golden.raw("weights", weights)
    for layer in range(layers):
        kinds = ACTIVATIONS if layer == 0 and all_kinds else ["silu_clamped"]
        golden.outputs(layer, model[layer], x, ids, weights, kinds, "silu_clamped")
    golden.end()


def make_gptoss(golden, name, seed, hidden, intermediate, experts, top_k, tokens):
    """GPT-OSS's layout: stacked experts, gate and up rows interleaved, biases."""
    random = Random(seed)
    golden.begin(name, hidden=hidden, intermediate=intermediate, layers=1, experts=experts,
                 top_k=top_k, tokens=tokens, id_bytes=4)
    golden.json("config.json", {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "experts_per_token": top_k,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"},
    })
    row = []
    for _ in range(experts):
        biases = tuple(random.normal(n).mul(gain).to(torch.bfloat16)
                       for n, gain in ((intermediate, 2), (intermediate, 2), (hidden, 3)))
        row.append(Expert(random.matrix(intermediate, hidden, 5),
                          random.matrix(intermediate, hidden, 5),
                          random.matrix(hidden, intermediate, 1), biases))

    def interleaved(gate, up):
        return torch.stack([gate, up], 1).reshape(2 * gate.shape[0], *gate.shape[1:])

    def blocks(packed):
        return packed.reshape(packed.shape[0], -1, GROUP // 2)

    stem = "model.layers.0.mlp.experts"
    tensors = {
        f"{stem}.gate_up_proj_blocks": torch.stack(
            [blocks(interleaved(e.gate.packed, e.up.packed)) for e in row]),
        f"{stem}.gate_up_proj_scales": torch.stack(
            [interleaved(e.gate.scales, e.up.scales) for e in row]),
        f"{stem}.gate_up_proj_bias": torch.stack(
            [interleaved(e.biases[0], e.biases[1]) for e in row]),
        f"{stem}.down_proj_blocks": torch.stack([blocks(e.down.packed) for e in row]),
        f"{stem}.down_proj_scales": torch.stack([e.down.scales for e in row]),
        f"{stem}.down_proj_bias": torch.stack([e.biases[2] for e in row]),
    }
    golden.safetensors("model.safetensors", tensors, lambda t: t.startswith(stem))
    x = random.normal(tokens, hidden) * torch.exp2(random.normal(tokens, 1) * 0.8)
    x = x.to(torch.bfloat16)
    ids, weights = random.routing(tokens, experts, top_k, 1.0, torch.int32)
    golden.raw("x", x)
    golden.raw("ids", ids)
    golden.raw("weights", weights)
    golden.outputs(0, row, x, ids, weights, ACTIVATIONS, "swiglu_oai")
    golden.end()


def make_extreme(golden, name, seed):
    """Scale bytes at both ends of E8M0, with inputs that bring the numbers back.

    Expert 0: gate and up with bytes from 0, x near 2^118. Expert 1: gate and up with bytes up to
    254, x near 2^-110. Expert 2: down with bytes from 0, y near 2^-115. Expert 3: down with bytes
    up to 254, h near 2^-100 made by small gate and up. One token visits one expert. Inputs and h
    stay well inside the normal floats: it is the weights that are extreme."""
    hidden = intermediate = 64
    tokens = 32
    random = Random(seed)
    golden.begin(name, hidden=hidden, intermediate=intermediate, layers=1, experts=4, top_k=1,
                 tokens=tokens, id_bytes=4)
    # log2 of typical weights of gate, up and down, and of x
    sizes = ((-123, -123, -2, 118), (126, 126, -2, -110), (0, 0, -124, 0), (-50, -54, 127, 0))
    row = [Expert(random.matrix(intermediate, hidden, 2.0**gate * 8),
                  random.matrix(intermediate, hidden, 2.0**up * 8),
                  random.matrix(hidden, intermediate, 2.0**down * 8))
           for gate, up, down, _ in sizes]
    x = torch.stack([random.normal(hidden) * 2.0 ** sizes[t % 4][3] for t in range(tokens)])
    x = x.to(torch.bfloat16)
    ids = (torch.arange(tokens, dtype=torch.int32) % 4).reshape(tokens, 1)
    weights = torch.ones(tokens, 1, dtype=torch.float32)
    tensors = {}
    for e, expert in enumerate(row):
        for tensor, matrix in (("w1", expert.gate), ("w3", expert.up), ("w2", expert.down)):
            tensors[f"experts.{e}.{tensor}.weight"] = matrix.packed
            tensors[f"experts.{e}.{tensor}.scale"] = matrix.scales
    golden.safetensors("experts.safetensors", tensors, lambda t: True)
    golden.raw("x", x)
    golden.raw("ids", ids)
    golden.raw("weights", weights)
    y = layer_output(row, x, ids, weights, silu)
    assert torch.isfinite(y.to(torch.float32)).all()
    golden.raw("y.0.silu", y.to(torch.float32))
    fast = layer_output(row, x, ids, weights, silu, int8_groups, int8_groups)
    exact = layer_output(row, x, ids, weights, silu, bf16, bf16)
    for e, expert in enumerate(row):
        bytes_used = ", ".join(
            f"{t} {int(m.scales.min())}-{int(m.scales.max())}"
            for t, m in (("gate", expert.gate), ("up", expert.up), ("down", expert.down)))
        golden.report.append(
            f"{name} expert {e}: scale bytes {bytes_used}; "
            f"y rms 2^{float(y[e::4].square().mean().sqrt().log2()):.1f}; relative L2 of ideal "
            f"int8 groups {relative(fast[e::4], y[e::4]):.2e}, "
            f"of bf16 x and h {relative(exact[e::4], y[e::4]):.2e}")
    golden.end()


def main() -> None:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    torch.set_num_threads(1)
    check_formats()
    golden = Golden(root)
    make_v4(golden, "v4_96x64", 4001, hidden=96, intermediate=64, layers=2, experts=6, top_k=3,
            tokens=33, draft=False, id_type=torch.int64, all_kinds=True)
    make_v4(golden, "v4_128x96", 4002, hidden=128, intermediate=96, layers=1, experts=3, top_k=2,
            tokens=33, draft=True, id_type=torch.int32, all_kinds=False)
    make_gptoss(golden, "gptoss_64x96", 4003, hidden=64, intermediate=96, experts=4, top_k=2,
                tokens=33)
    make_extreme(golden, "extreme_64x64", 4004)
    (root / "manifest.txt").write_text("\n".join(golden.lines) + "\n")
    print("\n".join(golden.report))


if __name__ == "__main__":
    main()
