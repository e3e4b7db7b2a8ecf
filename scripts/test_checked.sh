#!/bin/bash
# test_checked.sh [OUT]: every test of the kernels in checked simulation (src/sim/checked.h), for each block size and
# order of threads, and every lesson of OUT with its streams as late and as early as a GPU may run them. A line
# "ok ..." or "FAIL ..." for each.
set -u
cd "$(dirname "$0")/.."
out=${1:-build/cpu-fp32-g++}
case $out in build/cpu-fp32-*) ;; *) echo "skipped: checked simulation runs with DEVICE=cpu PRECISION=fp32"; exit 0 ;; esac
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT

scripts/variant.sh checked "${out##*-}" test_all > "$log/build" 2>&1 ||
  { tail -20 "$log/build"; echo "FAIL build of checked simulation"; exit 1; }

# one NAME PATTERN COMMAND...: the verdict into a file of its own, because two run at a time
one() {
  local name=$1 pattern=$2 file
  shift 2
  file=$(mktemp "$log/run.XXXXXX")
  if timeout 600 "$@" > "$file" 2>&1 && grep -qE "$pattern" "$file"; then echo "ok $name"
  else grep -vE '^\s*$' "$file" | tail -30; echo "FAIL $name: $*"; fi
}
export -f one
export log OPENBLAS_NUM_THREADS=1
{
  for block in 32 64 128 256 0; do  # 0: the block that production asks for
    cases='kernels*,checked*'
    [ $block = 0 ] && cases+=',attention*'  # the same kernels at more sizes
    for order in forward reverse random; do
      printf '%s\0' "checked kernels, blocks of ${block/#0/their own size}, $order order" \
        'test cases: +[1-9][0-9]* \| +[1-9][0-9]* passed \| 0 failed' \
        "$out-checked/test_all" --test-case="$cases" --order=$order --seed=$((block + 1)) --block=$block
    done
  done
} | xargs -0 -n 7 -P "$(nproc)" bash -c 'one "$@"' one | tee "$log/verdicts"

small="--dim 32 --heads 8 --kv-heads 4 --layers 8 --hidden 40 --seq 16 --batch 8 --steps 3"
for lesson in "$out"/[0-9][0-9]_*; do
  name=$(basename "$lesson")
  case $name in *.*) continue ;; esac
  ranks=4 parts=1
  case $name in
    01_single) ranks=1 ;;
    07_*|08_*|09_*|10_*) parts=4 ;;
  esac
  for streams in lazy ahead; do
    one "streams $streams, $name" '^summary.*proved' "$lesson" $small --threads $ranks --micro-batches $parts --streams $streams
  done
done | tee -a "$log/verdicts"
! grep -q '^FAIL' "$log/verdicts" && grep -q '^ok' "$log/verdicts"
