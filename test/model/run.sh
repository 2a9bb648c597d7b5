#!/usr/bin/env bash
# Model-checks the protocol: every line of `variants`, and compares the verdict with the expected one.
#
#   run.sh                    all variants; exit status 0 only when every verdict is as expected
#   run.sh breaking           those whose name begins with it
#   run.sh large              those of `variants_large`, which take half an hour
#   run.sh trace NAME         the counterexample of one variant, step by step
#
# JOBS (default: the number of cores) variants run at a time; LIMIT (default 300, large 3600) bounds one, in
# seconds. A search that did not visit every state (out of depth, memory or time) has no verdict and counts as
# a failure.
set -u
here=$(cd "$(dirname "$0")" && pwd)
compiler=${CC:-cc}
depth=100000
memory_mb=4000

command -v spin >/dev/null || {
  echo "run.sh: the model checker Spin is missing: 'apt-get install spin' (Debian, Ubuntu)," \
    "'brew install spin' (macOS), or https://spinroot.com" >&2
  exit 1
}
command -v "$compiler" >/dev/null || {
  echo "run.sh: no C compiler '$compiler' (Spin turns a model into a C program): 'apt-get install gcc'," \
    "or set CC" >&2
  exit 1
}

variants() { sed -E '/^(#|[[:space:]]*$)/d' "$@"; }

# Splits one line into $model, $name, $want and the array $flags.
parse() {
  local rest
  read -r name < <(sed -E 's/ {2,}.*//' <<<"$1")
  read -r want rest < <(sed -E 's/^.*[^ ] {2,}([a-z]+ +-D)/\1/' <<<"$1")
  read -ra flags <<<"$rest"
  model=${name%%:*}.pml
}

# Builds and runs the verifier of one variant in the current, empty directory: pan, spin.log, out.
# Optimising it pays only where many states are visited; a mutant mostly fails within its first few.
verify() {
  local optimize=-O0 search=-DSAFETY options=
  case $want in
    ends | endless) search="-DNP -DNFAIR=3" options="-l -f" ;; # cycles without progress, weak fairness
  esac
  case $want in pass | ends) optimize=-O1 ;; esac
  cp "$here"/*.pml "$here"/*.inc . &&
    spin -a "${flags[@]}" "$model" >spin.log 2>&1 &&
    "$compiler" $optimize -w $search -DVECTORSZ=4096 -DMEMLIM=$memory_mb -o pan pan.c >>spin.log 2>&1 ||
    return
  timeout "${LIMIT:-300}" ./pan -m$depth -w22 $options >out 2>&1 &
  wait $!
}

# The verdict, from the verifier's exit status and report. An error that was found counts, however far the
# search came; that none was found counts only if the search was complete.
verdict() {
  if [ "$1" = 124 ]; then
    echo timeout
  elif grep -qs '^pan:1: assertion violated' out; then
    echo assert
  elif grep -qs '^pan:1: invalid end state' out; then
    echo hang
  elif grep -qs '^pan:1: non-progress cycle' out; then
    echo endless
  elif grep -qsE 'max search depth too small|reached -DMEMLIM|out of memory' out; then
    echo truncated
  elif [ "$1" = 0 ] && grep -qs 'errors: 0' out && ! grep -q 'Search not completed' out; then
    echo pass
  else
    echo error
  fi
}

# One line of the table. Its first word says whether the verdict is the expected one.
check() {
  local start got states word=ok
  mkdir "$2" && cd "$2" || exit
  start=$(date +%s.%N)
  parse "$1"
  verify
  got=$(verdict $?)
  case $want:$got in
    reached:assert) got=reached ;;
    ends:pass) got=ends ;;
  esac
  states=$(grep -oE '[0-9.e+]+ states, stored' out 2>/dev/null | grep -oE '^[^ ]+')
  [ "$got" = "$want" ] || word=UNEXPECTED
  printf '%-10s %-42s %-8s %-9s %10s %7.1f\n' "$word" "$name" "$want" "$got" "${states:--}" \
    "$(awk "BEGIN { print $(date +%s.%N) - $start }")" >line
  [ "$word" = ok ] || grep -hsiE 'error|pan:|warning' spin.log out | sed 's/^/    /' >>line
  cd / && mv "$2/line" "$2.line" && rm -rf "$2"
}

work=$(mktemp -d)
workers=""
trap '[ -z "$workers" ] || kill $workers 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

if [ "${1:-}" = trace ]; then
  line=$(variants "$here"/variants* | grep -F -- "${2:?run.sh trace NAME}  ") || {
    echo "run.sh: no variant '$2'" >&2
    exit 1
  }
  parse "$line"
  cd "$work" || exit
  verify
  got=$(verdict $?)
  [ -e "$model.trail" ] || { echo "run.sh: '$name' has no counterexample: $got" >&2; exit 1; }
  spin -t -p -g -l "${flags[@]}" "$model"
  exit
fi

if [ "${1:-}" = large ]; then
  LIMIT=${LIMIT:-3600}
  mapfile -t lines < <(variants "$here/variants_large")
else
  mapfile -t lines < <(variants "$here/variants" | grep -E "^${1:-}")
fi
[ ${#lines[@]} -gt 0 ] || { echo "run.sh: no variant begins with '$1'" >&2; exit 1; }
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}

# Worker w takes the next variant that nobody has taken: making its marker succeeds for one worker only.
worker() {
  local i
  trap 'kill $(jobs -p) 2>/dev/null; exit 1' TERM
  for i in "${!lines[@]}"; do
    mkdir "$work/$i.taken" 2>/dev/null && check "${lines[$i]}" "$work/$i"
  done
}
for ((w = 0; w < jobs; w++)); do
  worker &
  workers+=" $!"
done

printf '%-10s %-42s %-8s %-9s %10s %7s\n' "" variant want got states seconds
passed=0 failed=0
for i in "${!lines[@]}"; do
  until [ -e "$work/$i.line" ]; do
    kill -0 $workers 2>/dev/null || [ -e "$work/$i.line" ] || {
      echo "run.sh: the workers have ended" >&2
      exit 1
    }
    sleep 0.1
  done
  cat "$work/$i.line"
  if grep -q '^ok' "$work/$i.line"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
