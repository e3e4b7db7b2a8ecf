#!/bin/bash
# test_faults.sh [OUT]: does the checker check? Each fault below is one line changed in a copy of a real kernel or
# lesson; the check that should find it must fail, and name the cause. A line "ok ..." or "FAIL ..." for each.
set -u
cd "$(dirname "$0")/.."
out=${1:-build/cpu-fp32-g++}
case $out in build/cpu-fp32-g++) ;; *) echo "skipped: faults are planted with DEVICE=cpu PRECISION=fp32 CXX=g++"; exit 0 ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
flags="-std=c++20 -O1 -g1 -fno-math-errno -fopenmp-simd -I$PWD/src/sim/include"

{ scripts/variant.sh checked g++ test_all && scripts/variant.sh address g++ 04_ddp; } > "$work/log" 2>&1 ||
  { tail -20 "$work/log"; echo "FAIL fault: the builds to plant them in"; exit 1; }

fail() { echo "FAIL fault: $1: $2"; failed=1; return 1; }

# plant NAME FILE REGEX REPLACEMENT: a copy of the tree's sources in $work with the one line that matches changed.
plant() {
  rm -rf "$work/kernels" "$work/lessons" "$work/src"
  cp -r kernels lessons "$work"
  ln -s "$PWD/src" "$work/src"
  local found
  found=$(grep -cE -- "$3" "$2")
  [ "$found" = 1 ] || { fail "$1" "the line to change, $3, stands $found times in $2, not once"; return 1; }
  sed -i -E "s|$3|$4|" "$work/$2"
}

# expect NAME PATTERN COMMAND...: must fail, and print the pattern
expect() {
  local name=$1 pattern=$2
  shift 2
  if timeout 300 "$@" > "$work/log" 2>&1; then fail "$name" "not found by $*"; return; fi
  if ! grep -qE "$pattern" "$work/log"; then tail -15 "$work/log"; fail "$name" "failed, but did not say: $pattern"; return; fi
  echo "ok fault: $name -> $(grep -oE "$pattern" "$work/log" | head -1 | sed "s|$PWD/||g; s|$work/||g")"
}

compile() { # compile NAME FLAGS... : what is behind -o must not fail
  local name=$1
  shift
  g++ $flags "$@" 2> "$work/compiler" || { head -5 "$work/compiler"; fail "$name" "does not compile"; }
}

# kernel NAME FILE REGEX REPLACEMENT KERNEL TEST PATTERN OPTIONS...: found by the test of that kernel, in checked blocks
kernel() {
  local name=$1 file=$2 object=$work/fault.o kernel=$5 test=$6 pattern=$7
  plant "$name" "$file" "$3" "$4" || return
  shift 7
  compile "$name" -DSIM_CHECKED -x c++ -c "$work/kernels/$kernel.cu" -o "$object" || return
  compile "$name" "$object" "$out-checked"/tests/test_{main,kernels}.o "$out-checked/libringtron.a" -o "$work/test" \
    -lopenblas -lpthread || return
  expect "$name" "$pattern" "$work/test" --test-case="$test" "$@"
}

# lesson NAME REGEX REPLACEMENT PATTERN OPTIONS...: found by the proof of 04_ddp
lesson() {
  local name=$1
  plant "$name" lessons/04_ddp.cpp "$2" "$3" || return
  local pattern=$4
  shift 4
  compile "$name" "$work/lessons/04_ddp.cpp" "$out/libringtron.a" -o "$work/lesson" -lopenblas -lpthread $mpi || return
  expect "$name" "$pattern" "$work/lesson" --dim 24 --heads 6 --kv-heads 2 --layers 3 --hidden 40 --seq 16 --batch 8 \
    --steps 3 --threads 4 --bucket-kb 10 "$@"
}
mpi=$(nm "$out/libringtron.a" 2>/dev/null | grep -c MPI_Init > /dev/null && echo -lmpich)

barrier='^    __syncthreads\(\);$'
kernel "a barrier removed" kernels/kernel.cuh "$barrier" "" \
  rmsnorm "kernels: rmsnorm" 'TEST CASE:  kernels: rmsnorm|inf <= ' --order=forward
kernel "the second barrier removed, so that shared memory is overwritten early" kernels/kernel.cuh \
  '^    __syncthreads\(\);  // nobody.*' "" softmax "kernels: softmax*" 'TEST CASE:  kernels: softmax.*' --order=reverse
kernel "a barrier under a condition" kernels/kernel.cuh "$barrier" "    if (threadIdx.x < 32) __syncthreads();" \
  rmsnorm "kernels: rmsnorm" 'a barrier must be reached by the whole block.*kernel.cuh:[0-9]+; threads.*'
kernel "a barrier under a condition, after which some end" kernels/sum_of_squares.cu \
  '^    __syncthreads\(\);$' "    if (threadIdx.x >= 64) return; __syncthreads();" sum_of_squares "kernels: sums*" \
  'a barrier must be reached by the whole block.*threads 0-63 wait.*threads 64-255 have ended'
kernel "a shuffle of the wrong width" kernels/kernel.cuh 'value, offset\)\);' 'value, offset, 16));' \
  softmax "kernels: softmax*" 'the shuffle at .*: a distance of 16 lanes in segments of 16'
kernel "a shuffle mask of half a warp" kernels/kernel.cuh '0xffffffffu' '0x0000ffffu' \
  softmax "kernels: softmax*" 'lane 16 calls it, and mask 0xffff does not name that lane'
kernel "one thread for each element" kernels/embedding.cu '^    for \(int i = threadIdx.x; i < D; i \+= blockDim.x\)$' \
  '    if (int i = threadIdx.x; i < D)' embedding "kernels: embedding*" 'inf <= 0'
kernel "an output that is not written" kernels/rmsnorm.cu '^    if \(threadIdx.x == 0\) rstd\[n\] = r;$' '' \
  rmsnorm "kernels: rmsnorm" 'inf <= '
kernel "a write past the buffer" kernels/elementwise.cu 'i < mine.end; i \+= blockDim.x\) out\[i\] = T\(value\)' \
  'i <= mine.end; i += blockDim.x) out[i] = T(value)' elementwise "kernels: fill*" 'std::all_of\(out.begin\(\) \+ size.*'

name="a read past the buffer"  # where tests have no guard behind their arrays: AddressSanitizer
address=build/cpu-fp32-g++-address
if plant "$name" kernels/rmsnorm.cu 'squares = block_sum\(D,' 'squares = block_sum(D + 1,' &&
   compile "$name" -fsanitize=address,undefined -DSIM_CHECKED -x c++ -c "$work/kernels/rmsnorm.cu" -o "$work/fault.o" &&
   compile "$name" -fsanitize=address,undefined "$work/fault.o" $address/lessons/04_ddp.o $address/libringtron.a \
     -o "$work/lesson" -lopenblas -lpthread; then
  ASAN_OPTIONS=detect_leaks=0 expect "$name" 'heap-buffer-overflow .*rmsnorm.cu:[0-9]+' "$work/lesson" \
    --dim 24 --heads 6 --kv-heads 2 --layers 1 --hidden 40 --seq 16 --batch 8 --steps 1 --threads 1
fi

wrong='FAIL +every gradient after step 1 .*|not finite.*|loss .* is nan.*'
lesson "the wait for a bucket's gradients is missing" '^    CUDA_CHECK\(cudaStreamWaitEvent\(comm, bucket.ready, 0\)\);$' '' \
  "$wrong" --streams ahead
lesson "the wait for the all-reduces is missing" '^.*cudaStreamWaitEvent\(dp.device\(\).stream\(\), buckets\[i\].done, 0\)\);$' '' \
  "$wrong" --streams lazy
lesson "the last bucket's gradients are used again before its all-reduce" \
  'for \(size_t i = 0; i < used; \+\+i\) CUDA_CHECK' 'for (size_t i = 0; i + 1 < used; ++i) CUDA_CHECK' "$wrong" --streams lazy
lesson "a bucket is filled again while its all-reduce is under way" '^    if \(used == buckets.size\(\)\) \{.*' \
  '    if (used == 2) used = 1; if (used == buckets.size()) {' 'leave a device buffer of.*|FAIL +every gradient.*' --streams lazy
exit $failed
