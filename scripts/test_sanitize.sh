#!/bin/bash
# test_sanitize.sh [OUT]: the tests and a few lessons under g++'s sanitizers; a line "ok ..." or "FAIL ..." for each.
#   AddressSanitizer and UBSan, with checked blocks: what reads past a buffer, uses it after its end, overflows.
#   ThreadSanitizer: ranks as threads, the transports between them, streams, events.
# Not the tests that start processes, nor MPI, whose library is not built for this.
set -u
cd "$(dirname "$0")/.."
out=${1:-build/cpu-fp32-g++}
case $out in build/cpu-fp32-g++) ;; *) echo "skipped: sanitizers run with DEVICE=cpu PRECISION=fp32 CXX=g++"; exit 0 ;; esac
log=$(mktemp)
trap 'rm -f "${main_log:-$log}" "$log"' EXIT
failed=0
export OPENBLAS_NUM_THREADS=1
export ASAN_OPTIONS=detect_leaks=0  # programs that end by an error leave much behind
export TSAN_OPTIONS="halt_on_error=1 suppressions=scripts/tsan.supp"

check() {  # check NAME PATTERN COMMAND...: must succeed, print the pattern and no report
  local name=$1 pattern=$2 from=$SECONDS
  shift 2
  if timeout 900 "$@" > "$log" 2>&1 && grep -qE "$pattern" "$log" && ! grep -qE "runtime error:|Sanitizer" "$log"; then
    echo "ok $name ($((SECONDS - from)) s)"
  else
    failed=1
    grep -vE '^\s*$' "$log" | tail -40
    echo "FAIL $name: $*"
  fi
}
address=build/cpu-fp32-g++-address thread=build/cpu-fp32-g++-thread
proved='^summary.*proved' all_passed='test cases: +[1-9][0-9]* \| +[1-9][0-9]* passed \| 0 failed'
small="--dim 24 --heads 6 --kv-heads 2 --hidden 40 --seq 16 --batch 8"

check "build with AddressSanitizer and UBSan" "" scripts/variant.sh address g++ test_all 04_ddp
check "build with ThreadSanitizer" "" scripts/variant.sh thread g++ test_all 03_ring 04_ddp
[ $failed = 0 ] || exit 1

{  # Narrow blocks switch less; test_checked.sh has the wide ones. Left out: attention, whose kernels are among kernels*,
   # and the long test of the collectives, which runs below.
  check "tests under AddressSanitizer and UBSan, checked blocks" "$all_passed" \
    $address/test_all --order=reverse --block=32 --test-case-exclude='attention*,nccl: collectives*'
  check "lesson 04_ddp under AddressSanitizer and UBSan" "$proved" $address/04_ddp $small --layers 1 --steps 2 --threads 2
  [ $failed = 0 ]
} &
address_run=$!
main_log=$log
log=$main_log.thread
check "streams and thread ranks under ThreadSanitizer" "$all_passed" $thread/test_all
check "lesson 03_ring under ThreadSanitizer" "$proved" $thread/03_ring $small --layers 2 --steps 2 --threads 4 --largest 4096
check "lesson 04_ddp under ThreadSanitizer" "$proved" $thread/04_ddp $small --layers 2 --steps 2 --threads 4 --bucket-kb 5
wait $address_run || failed=1
exit $failed
