#!/bin/bash
# The same kernels and model with bf16 storage: against double loops, PyTorch, and one rank.
set -u
unset MAKEFLAGS MAKELEVEL MFLAGS  # the make that is started here has its own jobs
out=build/cpu-bf16-g++
make PRECISION=bf16 DEVICE=cpu CXX=g++ all build-tests >/dev/null || { echo "FAIL bf16: the build"; exit 1; }
tests=$("$out/test_all" --test-case='kernels*,device*,attention*,the model*,two runs*,micro-batches*,ranges*,peak bytes*' 2>&1)
echo "$tests" | grep -q 'Status: SUCCESS' && echo "$tests" | grep -qE 'test cases: +[1-9]' \
  && echo "ok   bf16: kernels, attention, model" || { echo "$tests" | tail -30; echo "FAIL bf16: kernels, attention, model"; }
for lesson in "$out"/[0-9][0-9]_*; do
  name=$(basename "$lesson") ranks=2
  [ "$name" = 01_single ] && ranks=1
  run=$("$lesson" --threads $ranks --steps 5 --dim 32 --heads 4 --kv-heads 2 --layers 4 --hidden 64 --seq 16 --batch 8 2>&1)
  echo "$run" | grep -q '^summary.*proved' && echo "ok   bf16: $name" || { echo "$run" | tail -20; echo "FAIL bf16: $name"; }
done
