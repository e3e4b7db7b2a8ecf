#!/bin/bash
# variant.sh checked|address|thread COMPILER TARGETS...: builds for the simulated GPU, without MPI, into
# build/cpu-fp32-COMPILER-VARIANT. The one place that knows the flags of each.
#   checked   real blocks (src/sim/checked.h)          address   the same with AddressSanitizer and UBSan
#   thread    ThreadSanitizer
set -eu
variant=$1 compiler=$2
shift 2
cd "$(dirname "$0")/.."
math="-fno-math-errno -fno-trapping-math -fopenmp-simd"
case $variant in
  checked) flags="-DSIM_CHECKED" optimize="-O2 -march=native $math" tests="main kernels checked" ;;
  address) flags="-DSIM_CHECKED -fsanitize=address,undefined -fno-sanitize-recover=undefined"
           optimize="-O1 -fno-omit-frame-pointer $math"
           tests="main kernels checked model sim nccl trace safetensors" ;;
  thread)  flags="-fsanitize=thread" optimize="-O1 -fno-omit-frame-pointer $math" tests="main sim nccl" ;;
esac
out=build/cpu-fp32-$compiler-$variant
# What an outer make passes on (ARGS=, OUT of another build) does not concern this one.
env -u MAKEFLAGS -u MAKELEVEL -u MAKEOVERRIDES -u MFLAGS make DEVICE=cpu PRECISION=fp32 CXX="$compiler" RINGTRON_SETUP_DONE=1 HAVE_MPI= \
  VARIANT=-$variant EXTRA="$flags" OPTIMIZE="$optimize" TESTS="$(printf 'tests/test_%s.cpp ' $tests)" "${@/#/$out/}"
