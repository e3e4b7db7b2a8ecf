#!/bin/bash
# test.sh OUT [doctest options]: all tests, then the one line "N passed, N failed". Each test case counts, and so
# does each program that is run beside them. Never trusts an exit code alone: a run must also say how it ended.
set -u
out=$1
shift
passed=0 failed=0 skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

"$out/test_all" "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
line=$(grep -E '^\[doctest\] test cases:' "$log" | sed 's/\x1b\[[0-9;]*m//g')
if [[ $line =~ ([0-9]+)\ passed.*\ ([0-9]+)\ failed ]]; then
  passed=${BASH_REMATCH[1]} failed=${BASH_REMATCH[2]}
fi
[ "$status" = 0 ] || [ "$failed" != 0 ] || failed=1
[ "$passed" != 0 ] || failed=$((failed + 1))  # no test ran: a failure
skipped=$(grep -c '^skipped' "$log")
passed=$((passed - skipped))

if [ $# = 0 ]; then
  for check in scripts/test_*.sh; do
    [ -e "$check" ] || continue
    bash "$check" "$out" 2>&1 | tee "$log"
    if [ "${PIPESTATUS[0]}" = 0 ] && grep -q '^ok' "$log" && ! grep -q '^FAIL' "$log"; then :; else
      grep -q '^FAIL' "$log" || { echo "FAIL $check ended without a verdict"; failed=$((failed + 1)); }
    fi
    passed=$((passed + $(grep -c '^ok' "$log"))) failed=$((failed + $(grep -c '^FAIL' "$log")))
    skipped=$((skipped + $(grep -c '^skipped' "$log")))
  done
fi

if [ "$skipped" = 0 ]; then echo "$passed passed, $failed failed"; else echo "$passed passed, $failed failed, $skipped skipped"; fi
[ "$failed" = 0 ]
