#!/bin/bash
# exercise.sh next|one SLUG|progress|watch|hint SLUG LEVEL|solution SLUG|reset SLUG|skeletons
# What the targets of exercises.mk do. Nothing is stored: what is solved is found by running it.
set -u
. exercises/harness/common.sh

bar() {  # bar DONE ALL
  local i line=""
  for ((i = 0; i < $2; i++)); do line+=$([ "$i" -lt "$1" ] && echo '#' || echo '.'); done
  echo "[$line] $1 of $2"
}

# Builds and checks one; what is printed goes to stdout. An untouched skeleton need not be built to be known.
check() {  # check SLUG [--quiet]
  local slug=$1 log
  shift
  log=$($MAKE "$EX/bin/$slug" 2>&1) || {
    echo "$log" | grep -v '^make' | head -30
    echo "compiler   exercises/$slug.cpp does not compile: see the first error above"
    return 6
  }
  echo "$log" | grep 'warning:' | head -5
  run_checks "$EX/bin/$slug" "$slug" "$@"
}

show() {  # the full report on one exercise
  local slug=$1 status
  echo "$(field "$slug" 7) / $(field "$slug" 8)   (about $(field "$slug" 2) minutes, exercises/$slug.cpp)"
  echo "  $(field "$slug" 9)"
  echo "  $(field "$slug" 10)"
  check "$slug"
  status=$?
  case $status in
    0) echo "  why      $(text_of "$slug" why)" | sed '2,$s/^/           /'
       echo "  asked    $(text_of "$slug" asked)"
       echo "  compare  make solution-$slug" ;;
    2) echo "  next     write it in exercises/$slug.cpp, then: make ex-$slug      a hint: make hint-$slug" ;;
    6) ;;
    *) echo "  next     make hint-$slug      then LEVEL=2, LEVEL=3" ;;
  esac
  return $status
}

solved() { ! untouched "$1" && check "$1" --quiet >/dev/null 2>&1; }

case $1 in
  next)
    [ -e "$EX/libexercises.a" ] || { echo "building the exercises' library once (under a minute)"; $MAKE "$EX/libexercises.a" || exit 1; }
    done=0 all=$(slugs | wc -l) open=""
    for slug in $(slugs); do
      fresh=""  # changed since it was last built: if it passes now, say so, and why it matters
      [ "exercises/$slug.cpp" -nt "$EX/bin/$slug" ] && fresh=yes
      if solved "$slug"; then
        done=$((done + 1))
        [ -z "$fresh" ] || { show "$slug"; echo; }
      elif [ -z "$open" ]; then open=$slug; fi
    done
    if [ -z "$open" ]; then bar "$done" "$all"; echo "all solved; make ex-<slug> runs one again"; exit 0; fi
    show "$open"
    status=$?
    [ $status != 0 ] || done=$((done + 1))
    bar "$done" "$all"
    exit 0 ;;  # open work is no failure of make; ex-<slug> has an exit status
  one)
    show "$2" ;;
  progress)
    number=0 done=0
    for slug in $(slugs); do
      number=$((number + 1)) mark=' '
      if untouched "$slug"; then :; elif check "$slug" --quiet >/dev/null 2>&1; then mark=x done=$((done + 1)); else mark='-'; fi
      printf '[%s] %2d %-30s %3s min  %s / %s\n' "$mark" $number "$slug" "$(field "$slug" 2)" "$(field "$slug" 7)" "$(field "$slug" 8)"
    done
    bar $done $number
    echo "x solved, - begun; make ex: the next one, make ex-<slug>: any of them" ;;
  watch)
    last=""
    while :; do
      now=$(stat -c '%n %Y %s' exercises/*.cpp)
      if [ "$now" != "$last" ]; then clear 2>/dev/null; "$0" next; echo "watching exercises/*.cpp; Ctrl-C ends"; last=$now; fi
      sleep 0.5
    done ;;
  hint)
    case $3 in 1 | 2 | 3) ;; *) echo "LEVEL=$3: choose 1 (a question), 2 (the formula) or 3 (the first line)" >&2; exit 1 ;; esac
    echo "hint $3 of 3: $(text_of "$2" "hint $3")"
    [ "$3" = 3 ] || echo "more: make hint-$2 LEVEL=$(($3 + 1))" ;;
  solution)
    if [ -z "${FORCE:-}" ] && ! solved "$2"; then
      echo "exercises/$2.cpp does not pass yet. Hints: make hint-$2; to see the solution anyway: make solution-$2 FORCE=1" >&2
      exit 1
    fi
    generate "$2" solution ;;
  reset)
    if untouched "$2"; then echo "exercises/$2.cpp is as it was"; exit 0; fi
    n=1
    while [ -e "exercises/$2.cpp.backup$n" ]; do n=$((n + 1)); done
    cp "exercises/$2.cpp" "exercises/$2.cpp.backup$n" && generate "$2" skeleton > "exercises/$2.cpp" &&
      echo "exercises/$2.cpp is as it was; what you wrote is in exercises/$2.cpp.backup$n" ;;
  skeletons)
    for slug in $(slugs); do
      [ ! -e "exercises/$slug.cpp" ] || untouched "$slug" || cp "exercises/$slug.cpp" "exercises/$slug.cpp.backup"
      generate "$slug" skeleton > "exercises/$slug.cpp"
    done ;;
  *) echo "exercise.sh: unknown command $1" >&2; exit 1 ;;
esac
