#!/bin/bash
# prove.sh [SLUG...]: proves the exercises, one line each that starts with ok, FAIL or skipped.
#   skeleton   the committed one is what the generator makes, compiles without a warning, fails with its own message
#   solution   passes all its checks, at least as many as the manifest says, 50 times (REPEAT=), and under the thread
#              and address sanitizers (SANITIZE= leaves them out)
#   mutants    each one, a typical mistake, fails, and the message says what is written beside it
# and the runner's own exit statuses and texts.
set -u
. exercises/harness/common.sh
list=${*:-$(slugs)}
repeat=${REPEAT:-50}
work=$EX/prove
mkdir -p "$work"
ok() { echo "ok   exercises: $*"; }
failed=0
fail() { echo "FAIL exercises: $*"; failed=1; }
say_log() { sed 's/^/     | /' "$1" | head -25; }

# ---- generate and build all variants ----
put() { cmp -s - "$2" < "$1" && rm "$1" || mv "$1" "$2"; }  # keeps the time of what did not change
targets="" broken=""
for slug in $list; do
  for variant in skeleton solution $(generate "$slug" mutants | cut -f1); do
    generate "$slug" "$variant" > "$work/new" || { fail "$slug: $variant cannot be made"; continue; }
    put "$work/new" "$work/$slug--$variant.cpp"
    targets+=" $work/$slug--$variant"
  done
done
$MAKE -k $targets > "$work/build.log" 2>&1 || broken=yes
grep -q 'warning:' "$work/build.log" && { fail "compiler warnings:"; grep 'warning:' "$work/build.log" | head; }
[ -z "$broken" ] || { grep -E 'error' "$work/build.log" | head; }

# ---- run ----
for slug in $list; do
  # In a clone where the learner has begun, the committed file counts.
  if untouched "$slug" || git show "HEAD:exercises/$slug.cpp" 2>/dev/null | cmp -s - "$work/$slug--skeleton.cpp"; then
    run_checks "$work/$slug--skeleton" "$slug" > "$work/log" 2>&1
    status=$?
    if [ $status = 2 ] && grep -q "^TODO .*" "$work/log" && grep -q "not implemented yet: $slug (about [0-9]* lines*)" "$work/log"; then
      ok "$slug: the skeleton says what is to do"
    else
      fail "$slug: the skeleton ends with $status, not 2"; say_log "$work/log"
    fi
  else
    fail "$slug: exercises/$slug.cpp is not what the generator makes: make ex-skeletons"
  fi
  for key in "hint 1" "hint 2" "hint 3" why asked; do
    [ -n "$(text_of "$slug" "$key")" ] || fail "$slug has no text '$key'"
  done
  for number in 2 3 4 5 6 7 8 9 10; do
    [ -n "$(field "$slug" $number)" ] || fail "$slug: the manifest has no field $number"
  done
  grep -qF "[$slug]($slug.cpp) | $(field "$slug" 2) |" exercises/README.md || fail "$slug is not in exercises/README.md with its minutes"
  if run_checks "$work/$slug--solution" "$slug" --repeat "$repeat" > "$work/log" 2>&1 && grep -q '^passed' "$work/log"; then
    ok "$slug: the solution passes ($(grep -o '[0-9]* checks, .*' "$work/log"))"
  else
    fail "$slug: the solution"; say_log "$work/log"
  fi
  count=0 wrong=0
  while IFS=$'\t' read -r name says; do
    count=$((count + 1))
    run_checks "$work/$slug--$name" "$slug" > "$work/log" 2>&1
    status=$?
    case $status in
      1 | 3 | 4) tr '\n' ' ' < "$work/log" | tr -s ' ' | grep -qF -- "$says" && continue
                 fail "$slug: mutant '$name' fails (status $status), but is not told \"$says\"" ;;
      *) fail "$slug: mutant '$name' ends with $status" ;;
    esac
    say_log "$work/log"
    wrong=$((wrong + 1))
  done < <(generate "$slug" mutants)
  if [ $count -lt 4 ]; then fail "$slug has $count mutants, needs 4"
  elif [ $wrong = 0 ]; then ok "$slug: $count typical mistakes fail, and are named"; fi
done

# ---- sanitizers ----
for sanitize in ${SANITIZE-thread address}; do
  bad=0
  $MAKE -k EX_SUFFIX="-$sanitize" EX_SANITIZE="-fsanitize=$sanitize" $(for s in $list; do echo "build/exercises-$sanitize/prove/$s--solution"; done) \
    > "$work/build.log" 2>&1 < /dev/null || { fail "building for the $sanitize sanitizer"; grep -E 'error|No rule' "$work/build.log" | head -5; continue; }
  for slug in $list; do
    TSAN_OPTIONS="exitcode=66" run_checks "build/exercises-$sanitize/prove/$slug--solution" "$slug" > "$work/log" 2>&1 && grep -q '^passed' "$work/log" ||
      { bad=1; fail "$slug under the $sanitize sanitizer"; say_log "$work/log"; }
  done
  [ $bad = 1 ] || ok "all solutions pass under the $sanitize sanitizer"
done

# ---- the runner ----
[ $# = 0 ] || exit $failed
expect() {  # expect NAME STATUS TEXT command...: exit status and a text of what is printed
  local name=$1 status=$2 text=$3
  shift 3
  "$@" > "$work/log" 2>&1
  local got=$?
  if [ $got = "$status" ] && grep -qF -- "$text" "$work/log"; then ok "runner: $name"
  else fail "runner: $name ended with $got, not $status, or does not say \"$text\""; say_log "$work/log"; fi
}
expect "passed is 0" 0 "passed     ring-all-reduce" run_checks "$work/ring-all-reduce--solution" ring-all-reduce
expect "wrong is 1" 1 "wrong " run_checks "$work/ring-all-reduce--overwrite" ring-all-reduce
expect "TODO is 2" 2 "TODO " run_checks "$work/ring-all-reduce--skeleton" ring-all-reduce
expect "deadlock is 3, and says who waits for whom" 3 "waiting for rank" run_checks "$work/ring-all-reduce--alone" ring-all-reduce
expect "too few checks is 5" 5 "the manifest wants 9999" "$work/ring-all-reduce--solution" --min-checks 9999
expect "no check at all is 5" 5 "0 checks ran" "$work/ring-all-reduce--solution" --test-case=nothing
expect "a place is named" 1 "element 0: got" run_checks "$work/ring-all-reduce--overwrite" ring-all-reduce
expect "a missing rank is named" 1 "are missing" run_checks "$work/ring-all-reduce--overwrite" ring-all-reduce
printf '#include "exercises.h"\nNeighbors ring_neighbors(int rank, int) { volatile int* p = nullptr; return {*p, rank}; }\n' > "$work/ring-neighbors--crash.cpp"
printf '#include "exercises.h"\nNeighbors ring_neighbors(int rank, int n) { volatile int zero = n; zero = 0; return {rank %% zero, rank}; }\n' > "$work/ring-neighbors--division.cpp"
$MAKE "$work/ring-neighbors--crash" "$work/ring-neighbors--division" > "$work/build.log" 2>&1
expect "crash is 4" 4 "signal 11" run_checks "$work/ring-neighbors--crash" ring-neighbors
expect "division by zero is 4" 4 "divided by 0" run_checks "$work/ring-neighbors--division" ring-neighbors
expect "a hint" 0 "hint 2 of 3" exercises/harness/exercise.sh hint ring-all-reduce 2
expect "no such hint" 1 "LEVEL=7" exercises/harness/exercise.sh hint ring-all-reduce 7
if untouched ring-all-reduce; then
  expect "no solution before a pass" 1 "does not pass yet" exercises/harness/exercise.sh solution ring-all-reduce
fi
expect "the solution if asked for" 0 "exchange" env FORCE=1 exercises/harness/exercise.sh solution ring-all-reduce

# A learner's hour, in a copy of the tree.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir -p "$copy/build/exercises"
cp -rp exercises "$copy/"
cp -rp "$EX/src" "$EX/exercises" "$EX/libexercises.a" "$copy/build/exercises/"
for name in Makefile src kernels scripts tests tools lessons notes README.md; do ln -s "$PWD/$name" "$copy/$name"; done
for slug in $(slugs); do generate "$slug" skeleton > "$copy/exercises/$slug.cpp"; done
work=$PWD/$work
cd "$copy" || exit 1
EX=build/exercises
export EX CXX MAKE
sh=exercises/harness/exercise.sh
expect "the first open exercise" 0 "0 of $(slugs | wc -l)" $sh next
generate ring-neighbors solution > exercises/ring-neighbors.cpp
expect "a pass says why it matters" 0 "$(text_of ring-neighbors why | head -1)" $sh next
expect "and then shows the next one" 0 "not implemented yet: device-mesh" $sh next
generate device-mesh adjacent > exercises/device-mesh.cpp
expect "a mistake goes with a likely cause" 0 "likely " $sh next
expect "progress is found by running" 0 "[x]  1 ring-neighbors" $sh progress
echo 'this is no C++' > exercises/device-mesh.cpp
expect "what does not compile is 6" 6 "does not compile" $sh one device-mesh
expect "reset keeps what was there" 0 "device-mesh.cpp.backup1" $sh reset device-mesh
expect "the solution after a pass" 0 "(rank + 1) % ranks" $sh solution ring-neighbors
exit $failed
