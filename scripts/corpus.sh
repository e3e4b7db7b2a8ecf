#!/bin/bash
# corpus.sh: prints the default training text: README.md and notes/*.md in a fixed order, without the blocks of
# numbers (they change) and without lines that hold more than ASCII (a model of bytes would learn to print a half of a
# character).
set -eu
cd "$(dirname "$0")/.."
export LC_ALL=C
for file in README.md notes/*.md; do
  [ -e "$file" ] || continue
  awk '/^```+/ { match($0, /^`+/)
                 if (!fence) { fence = RLENGTH; ours = substr($0, RLENGTH + 1) == "ringtron"; if (ours) next }
                 else if (RLENGTH >= fence && RLENGTH == length($0)) { was = ours; fence = ours = 0; if (was) next } }
       !ours' "$file"
  echo
done | sed 's/<a id="[^"]*"><\/a>//g' | grep -v -e '[^[:print:][:blank:]]' -e '^|---' | sed 's/[ \t]*$//' | cat -s
