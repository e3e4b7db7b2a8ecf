#!/bin/bash
# missing.sh "compiler and flags" package:header-or-program ...: prints the packages whose header the compiler does
# not find, or whose program is not on the PATH.
set -u
compile=$1
shift
for entry in "$@"; do
  package=${entry%%:*} wanted=${entry#*:}
  case $wanted in
    *.h|*.hpp) echo "#include <$wanted>" | $compile -std=c++20 -E -x c++ - >/dev/null 2>&1 || echo "$package" ;;
    *) command -v "$wanted" >/dev/null || echo "$package" ;;
  esac
done
