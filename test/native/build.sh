#!/usr/bin/env bash
# Builds the stress program: build.sh CSRC PROGRAM [COMPILER FLAGS...]
# CSRC is the folder with the protocol's sources: csrc/, or a changed copy of it. CXX names another compiler than g++.
#
# All sources make one translation unit: most of the time is spent in the standard headers that each would read again,
# and the program is built anew for every sanitizer and every mutant.
set -euo pipefail
csrc=$(cd "$1" && pwd)
program=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
for source in "$csrc"/cpu/*.cpp "$here"/*.cpp; do
  printf '#include "%s"\n' "$source"
done | "${CXX:-g++}" -std=c++20 -O1 -g1 -Wall -Wextra -DGPUSYNC_NO_CLONES "$@" \
  -I"$csrc" -I"$csrc/include" -I"$csrc/cpu" -I"$here" -x c++ - -o "$program" -pthread
