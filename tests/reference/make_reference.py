#!/usr/bin/env python3
"""Writes llama_untied.safetensors and llama_tied.safetensors: what PyTorch says a small Llama computes.

The model is transformers' LlamaForCausalLM, written out in plain torch and run in double precision on the CPU.
Needs torch and numpy only. README.md beside this file says what the two files hold.
"""
import json
import math
import pathlib
import struct

import numpy as np
import torch
import torch.nn.functional as F

DTYPE = torch.float64
STEPS = 3
IGNORED = -1
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0

# Each case: seed of weights and tokens, batch, sequence length, the number of ignored targets in each step, the config.
# The counts differ so that a wrong denominator shows. The seeds give norms on both sides of CLIP (main asserts it).
CASES = {
    "untied": dict(seed=1169, batch=4, seq=13, ignored=(2, 6, 3), config=dict(
        vocab_size=33, hidden_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=40, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False)),
    "tied": dict(seed=639, batch=3, seq=9, ignored=(1, 4, 2), config=dict(
        vocab_size=29, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=28, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True)),
}


def shapes(c):
    """Name -> shape of every stored parameter; a linear layer's weight is (outputs, inputs)."""
    d, f = c["hidden_size"], c["intermediate_size"]
    kv = d // c["num_attention_heads"] * c["num_key_value_heads"]
    out = {"model.embed_tokens.weight": (c["vocab_size"], d)}
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        out[p + "input_layernorm.weight"] = (d,)
        out[p + "self_attn.q_proj.weight"] = (d, d)
        out[p + "self_attn.k_proj.weight"] = (kv, d)
        out[p + "self_attn.v_proj.weight"] = (kv, d)
        out[p + "self_attn.o_proj.weight"] = (d, d)
        out[p + "post_attention_layernorm.weight"] = (d,)
        out[p + "mlp.gate_proj.weight"] = (f, d)
        out[p + "mlp.up_proj.weight"] = (f, d)
        out[p + "mlp.down_proj.weight"] = (d, f)
    out["model.norm.weight"] = (d,)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (c["vocab_size"], d)
    return out


def start_weights(c, rng):
    """Float32 arrays, so that a float32 reader starts from exactly these values."""
    return {name: (rng.normal(0, 0.1, shape) + (len(shape) == 1)).astype(np.float32)
            for name, shape in shapes(c).items()}


def start_data(case, rng):
    """tokens and targets, both (STEPS, batch, seq) int32; a target is IGNORED in a few places."""
    b, t, vocab = case["batch"], case["seq"], case["config"]["vocab_size"]
    text = rng.integers(0, vocab, (STEPS, b, t + 1)).astype(np.int32)
    tokens, targets = text[:, :, :-1].copy(), text[:, :, 1:].copy()
    # The second step has two input ids and targets spread evenly: errors average out, and the norm stays below CLIP.
    tokens[1] = rng.integers(0, 2, (b, t))
    targets[1] = rng.permutation(np.arange(b * t) % vocab).reshape(b, t)
    for step, count in enumerate(case["ignored"]):
        # All in the first two sequences: a mean of per-sequence means then differs from the mean over tokens.
        targets[step].reshape(-1)[rng.permutation(2 * t)[:count]] = IGNORED
    return tokens, targets


def rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rope(x, theta):
    """x (B, heads, T, head): element i turns together with element i + head/2 (half-rotated, not interleaved)."""
    t, h = x.shape[-2:]
    frequency = theta ** (-torch.arange(0, h, 2, dtype=DTYPE) / h)
    angle = torch.outer(torch.arange(t, dtype=DTYPE), frequency).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()


def attention(x, w, p, c):
    b, t, d = x.shape
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    size = d // heads

    def project(name, n):
        return (x @ w[p + name].T).view(b, t, n, size).transpose(1, 2)

    q = rope(project("self_attn.q_proj.weight", heads), c["rope_theta"])
    k = rope(project("self_attn.k_proj.weight", kv_heads), c["rope_theta"])
    v = project("self_attn.v_proj.weight", kv_heads)
    # Query head i reads key/value head i // (heads / kv_heads).
    k, v = (z.repeat_interleave(heads // kv_heads, dim=1) for z in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
    return out @ w[p + "self_attn.o_proj.weight"].T


def mlp(x, w, p):
    gate, up = x @ w[p + "mlp.gate_proj.weight"].T, x @ w[p + "mlp.up_proj.weight"].T
    return (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T


def llama(tokens, w, c):
    """tokens (B, T) -> logits (B, T, vocab)."""
    eps = c["rms_norm_eps"]
    x = F.embedding(tokens, w["model.embed_tokens.weight"])
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        x = x + attention(rms_norm(x, w[p + "input_layernorm.weight"], eps), w, p, c)
        x = x + mlp(rms_norm(x, w[p + "post_attention_layernorm.weight"], eps), w, p)
    x = rms_norm(x, w["model.norm.weight"], eps)
    head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return x @ w[head].T


def mean_loss(logits, targets):
    """Sum over the valid tokens, divided by their number."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum()


def adamw(w, gradients, m, v, step):
    """In place; step counts from 1. Matrices (embedding and head too) decay, norm weights do not."""
    for name, g in gradients.items():
        m[name].mul_(BETAS[0]).add_((1 - BETAS[0]) * g)
        v[name].mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
        mhat, vhat = m[name] / (1 - BETAS[0] ** step), v[name] / (1 - BETAS[1] ** step)
        decay = WEIGHT_DECAY if w[name].dim() > 1 else 0.0
        w[name] -= LR * (mhat / (vhat.sqrt() + EPS) + decay * w[name])


def reference(case):
    """Trains one case; returns name -> array, as README.md describes."""
    c, rng = case["config"], np.random.default_rng(case["seed"])
    start = start_weights(c, rng)
    tokens, targets = start_data(case, rng)
    out = {"tokens": tokens, "targets": targets}
    out.update(("start." + name, value) for name, value in start.items())

    w = {name: torch.tensor(value, dtype=DTYPE, requires_grad=True) for name, value in start.items()}
    m, v = ({name: torch.zeros_like(value) for name, value in w.items()} for _ in range(2))
    losses, norms = [], []
    for step in range(STEPS):
        logits = llama(torch.tensor(tokens[step]).long(), w, c)
        loss = mean_loss(logits, torch.tensor(targets[step]).long())
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values()))))
        norm = math.sqrt(sum(g.pow(2).sum().item() for g in gradients.values()))
        losses.append(loss.item())
        norms.append(norm)
        if step == 0:
            out["logits"] = logits.detach().numpy()
            out.update(("grad." + name, g.numpy().copy()) for name, g in gradients.items())
        factor = min(1.0, CLIP / norm)
        with torch.no_grad():
            adamw(w, {name: g * factor for name, g in gradients.items()}, m, v, step + 1)
    out["loss"], out["norm"] = np.array(losses), np.array(norms)
    out.update(("end." + name, value.detach().numpy()) for name, value in w.items())
    return out


def write_safetensors(path, tensors, metadata):
    """8 bytes: header length, little-endian; the header, JSON, padded with spaces to 8 bytes; the raw values."""
    names = {"float32": "F32", "float64": "F64", "int32": "I32"}
    header, blobs, offset = {"__metadata__": metadata}, [], 0
    for name, value in sorted(tensors.items()):
        blob = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<")).tobytes()
        assert offset % value.itemsize == 0, name
        header[name] = {"dtype": names[value.dtype.name], "shape": list(value.shape),
                        "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def main():
    torch.set_num_threads(1)
    for name, case in CASES.items():
        out = reference(case)
        assert out["norm"].min() < CLIP < out["norm"].max(), f"clipping must act in some steps only: {out['norm']}"
        settings = dict(case["config"], lr=LR, betas=list(BETAS), eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP)
        metadata = {key: json.dumps(value) for key, value in settings.items()}
        path = pathlib.Path(__file__).with_name(f"llama_{name}.safetensors")
        write_safetensors(path, out, dict(metadata, format="pt"))
        print(path.name, "loss", *out["loss"], "norm", *out["norm"])


if __name__ == "__main__":
    main()
