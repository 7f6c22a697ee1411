#!/usr/bin/env bash
# Make several targets in parallel: `together.sh TARGET ...`. Shows each target's whole output, in the given order; fails if a target failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p build/logs
declare -A running
trap 'kill "${running[@]}" 2>/dev/null' INT TERM
for target in "$@"; do
  make --no-print-directory "$target" >"build/logs/$target.log" 2>&1 &
  running[$target]=$!
done
failed=()
for target in "$@"; do
  wait "${running[$target]}" || failed+=("$target")
  cat "build/logs/$target.log"
done
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: make ${failed[*]}" >&2; exit 1; }
