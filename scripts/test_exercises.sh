#!/bin/bash
# test_exercises.sh: the exercises' own proof (exercises/harness/prove.sh), as a part of `make test`.
cd "$(dirname "$0")/.." || exit 1
EX=build/exercises CXX=${CXX:-g++} MAKE="make CXX=${CXX:-g++} DEVICE=cpu RINGTRON_SETUP_DONE=1" exec exercises/harness/prove.sh
