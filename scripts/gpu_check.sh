#!/bin/bash
# gpu_check.sh: everything to find out on a machine with a GPU and no network, in about 4 minutes, ending in one
# table. A failure is a row of the table and never hides the rest. Needs the CUDA toolkit; not MPI, not OpenBLAS.
# DEPS= names a folder with the header-only libraries (doctest, CLI11, nlohmann-json), where they are not installed.
set -u
cd "$(dirname "$0")/.."
export RINGTRON_SETUP_DONE=1
started=$SECONDS
rows=()
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT

# row NAME LIMIT_SECONDS COMMAND...: runs it, keeps its output, notes verdict and time.
row() {
  local name=$1 limit=$2 from=$SECONDS
  shift 2
  echo "== $name: $*"
  timeout "$limit" "$@" > "$log/$name" 2>&1
  local status=$? verdict=ok
  [ $status = 0 ] || verdict="FAILED ($status)"
  [ $status = 124 ] && verdict="FAILED (over $limit s)"
  tail -25 "$log/$name"
  rows+=("$name|$verdict|$((SECONDS - from)) s|$(grep -hE '^(bench|summary|\[doctest\] test cases|worst|ERROR SUMMARY|========= ERROR|========= RACECHECK)' "$log/$name" | tail -1 | tr '\t' ' ')")
  return $status
}
skip() { echo "== $1: skipped, $2"; rows+=("$1|skipped|0 s|$2"); }

nvidia-smi -L || echo "no GPU is visible: what follows will fail"
make info DEVICE=cuda DEPS="${DEPS:-}"
build=(make -j"$(nproc)" DEVICE=cuda DEPS="${DEPS:-}")
if ! { [ -f lessons/corpus.txt ]; }; then echo "lessons/corpus.txt is missing"; fi

row build-fp32 150 "${build[@]}" COMM=host all build-tests build-bench
row build-bf16 150 "${build[@]}" PRECISION=bf16 COMM=host all build-tests build-bench
fp32=build/cuda-fp32-g++-host bf16=build/cuda-bf16-g++-host
row kernels-fp32 60 "$fp32/test_all" --test-case='kernels*,device*,attention*'
row kernels-bf16 60 "$bf16/test_all" --test-case='kernels*,device*,attention*'
row reference-fp32 60 "$fp32/test_all" --test-case='*PyTorch*'
row reference-bf16 60 "$bf16/test_all" --test-case='*PyTorch*'
row model-fp32 60 "$fp32/test_all" --test-case-exclude='*PyTorch*,kernels*,device*,attention*,lesson*,mpi*,corpus*,safetensors*,notes*'
row single-fp32 60 "$fp32/01_single" --steps 100
row single-bf16 60 "$bf16/01_single" --steps 100
for lesson in "$fp32"/[0-9][0-9]_*; do  # ranks are threads that share the GPU
  name=$(basename "$lesson")
  case $name in *.*|01_single) continue ;; esac
  row "$name" 60 "$lesson" --threads 4
done
if "${build[@]}" COMM=nccl all > "$log/nccl-build" 2>&1; then
  for lesson in build/cuda-fp32-g++/[0-9][0-9]_*; do
    name=$(basename "$lesson")
    case $name in *.*|01_single) continue ;; esac
    row "nccl-$name" 60 "$lesson" --threads 1
  done
else
  skip nccl "the build with NCCL failed: $(tail -1 "$log/nccl-build")"
fi
if command -v compute-sanitizer >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" ]; then
  sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
  row memcheck 90 "$sanitizer" --tool memcheck --error-exitcode 9 "$fp32/test_all" --test-case='kernels*,device*,attention*'
  row racecheck 90 "$sanitizer" --tool racecheck --error-exitcode 9 "$fp32/test_all" --test-case='kernels*,device*,attention*'
else
  skip compute-sanitizer "not installed"
fi
row bench-fp32 60 "$fp32/bench" single/gpu
row bench-bf16 60 "$bf16/bench" single/gpu

echo
echo "gpu-check, $((SECONDS - started)) s in all"
printf '%s\n' "${rows[@]}" | awk -F'|' '{ printf "  %-16s %-16s %6s  %s\n", $1, $2, $3, $4 }'
grep -h '^bench' "$log"/bench-* 2>/dev/null | awk -F'\t' '{ printf "  %-40s %12s %s\n", $2, $3, $4 }'
printf '%s\n' "${rows[@]}" | grep -q FAILED && exit 1
exit 0
