#!/bin/bash
# run_all.sh OUT "LESSONS" RANKS HAVE_MPI [OPTIONS]: runs every stage and prints one table. Fails if any stage failed.
set -u
out=$1 lessons=$2 ranks=$3 have_mpi=$4
shift 4
log=$(mktemp)
trap 'rm -f "$log" "$log.one"' EXIT
failed=0
for lesson in $lessons; do
  name=$(basename "$lesson" .cpp)
  echo
  scripts/run_stage.sh "$out/$name" "$ranks" "$have_mpi" "$@" 2>&1 | tee "$log.one"
  [ "${PIPESTATUS[0]}" = 0 ] && grep -qE "^summary.*(proved|skipped)" "$log.one" || failed=$((failed + 1))
  grep "^summary" "$log.one" >> "$log" || printf 'summary\t%s\tFAILED\t-\t-\t-\t-\t-\n' "${name:3}" >> "$log"
done
echo
awk -F'\t' 'BEGIN { f = "%-16s %-8s %6s %10s %10s %12s %9s\n"
                    printf f, "stage", "proof", "ranks", "loss at 1", "at end", "tokens/s", "seconds" }
            { printf f, $2, $3, $4, $5, $6, $7, $8 }' "$log"
[ "$failed" = 0 ]
