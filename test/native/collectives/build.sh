#!/usr/bin/env bash
# Builds the program that runs the collectives' kernels on the CPU: build.sh CSRC PROGRAM [COMPILER FLAGS...]
# CSRC is the folder with the kernels' sources: csrc/, or a changed copy of it. CXX names another compiler than g++.
#
# nvcc knows where CUDA's headers are; given C++, it calls the host's compiler with them and does nothing else. The
# kernels read one type as another, as CUDA's compiler lets them.
set -euo pipefail
csrc=$(cd "$1" && pwd)
program=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
source=$(mktemp "${TMPDIR:-/tmp}/gpusync-collectives-XXXXXX.cpp")
trap 'rm -f "$source"' EXIT
for file in "$here"/cuda_on_host.h "$csrc"/cuda/{pull_one_shot,pull_two_shot,push_one_shot,push_copy,push_rms_norm,exchange_kernels}.cu \
  "$csrc"/cpu/reduce.cpp "$here"/*.cpp; do
  printf '#include "%s"\n' "$file"
done >"$source"
flags=(-O1 -g1 -Wall -Wextra -Wno-unknown-pragmas -Wno-maybe-uninitialized -fno-strict-aliasing -pthread "$@")
"${CUDACXX:-nvcc}" -x c++ -std=c++20 -ccbin "${CXX:-g++}" -cudart none "${flags[@]/#/-Xcompiler=}" \
  -DGPUSYNC_HOST_THREADS -DGPUSYNC_NO_CLONES -I"$csrc" -I"$csrc/include" -I"$here" "$source" -o "$program"
