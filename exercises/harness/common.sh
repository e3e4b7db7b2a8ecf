# What exercise.sh and prove.sh share. Expects EX, CXX and MAKE in the environment, and the repository's root as folder.
unset MAKEFLAGS MAKELEVEL MFLAGS  # the make that is started here reads its own
manifest=${MANIFEST:-exercises/manifest}
slugs() { sed -n 's/^\([a-z0-9-]*\) | .*/\1/p' "$manifest"; }
# field SLUG NUMBER: 2 minutes, 3 checks, 4 needs, 5 lesson, 6 note, 7 title, 8 中文, 9 task, 10 任务
field() { awk -F' [|] ' -v slug="$1" -v n="$2" '$1 == slug { print $n }' "$manifest"; }
generate() { awk -v want="$2" -f exercises/harness/generate.awk "exercises/src/$1.cpp"; }
text_of() { generate "$1" "text:$2"; }
untouched() { generate "$1" skeleton | cmp -s - "exercises/$1.cpp"; }
# run BINARY SLUG [options]: the checks. 0 passed, 1 wrong, 2 TODO, 3 deadlock, 4 crash, 5 harness
run_checks() {
  local binary=$1 slug=$2
  shift 2
  local note
  note=$(field "$slug" 6)
  [ -e "${note%%#*}" ] || note=notes/README.md  # a note that is still to be written
  OPENBLAS_NUM_THREADS=1 "$binary" --min-checks "$(field "$slug" 3)" --note "$note" "$@"
}
