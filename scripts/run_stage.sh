#!/bin/bash
# run_stage.sh PROGRAM RANKS HAVE_MPI [OPTIONS]: starts one stage, as MPI processes or as threads.
set -u
program=$1 ranks=$2 have_mpi=$3
shift 3
mkdir -p out
case $(basename "$program") in 01_*) exec "$program" "$@" ;; esac  # the one about one rank
[[ " $* " == *" --threads "* || " $* " == *" --help "* ]] && exec "$program" "$@"
if [ "$have_mpi" = yes ]; then exec mpiexec -n "$ranks" "$program" "$@"; fi
exec "$program" --threads "$ranks" "$@"
