#!/usr/bin/env python3
"""check_transformers.py DIR FILE: does transformers compute the same logits from a checkpoint that ringtron saved?

DIR holds config.json and model.safetensors (Hugging Face names). FILE is a safetensors file with "tokens"
(I32, (B, T)) and "logits" (F32, (B, T, vocab)). Prints the largest difference, relative to the largest logit;
exits 1 if it is above 1e-4 (or not a number), or if a weight is missing, unknown or of the wrong shape.
Needs torch and transformers.
"""
import sys

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

BOUND = 1e-4


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, file = sys.argv[1:]
    # Without this list, a weight missing from the checkpoint would only warn, and be drawn at random.
    model, info = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            sys.exit(f"{folder}: {kind}: {sorted(info[kind])}")

    data = load_file(file)
    with torch.no_grad():
        want = model.float().eval()(data["tokens"].long(), use_cache=False).logits
    have = data["logits"]
    if have.shape != want.shape:
        sys.exit(f"{file}: logits have shape {tuple(have.shape)}, transformers gives {tuple(want.shape)}")
    difference = ((have - want).abs().max() / want.abs().max()).item()
    good = difference <= BOUND
    print(f"largest difference / largest logit: {difference:.3g} (bound {BOUND:g}): {'same' if good else 'DIFFERENT'}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
