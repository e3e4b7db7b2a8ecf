#!/bin/bash
# Every block of numbers in README.md and the notes, against what its command prints now.
set -u
"$1/notes_check"
