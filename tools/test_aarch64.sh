#!/usr/bin/env bash
# Compiles the C++ tests for aarch64 with zig and runs them under qemu-user (`make test-aarch64`).
#
# Skips, with the reason, if qemu-user is unavailable. Usage: tools/test_aarch64.sh <python of the wheel tools>
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1
tools=$(cd "$(dirname "$python")" && pwd)
build=build/native-aarch64

if ! EMULATOR=$(tools/qemu.sh); then
  echo "make test-aarch64: skipped, because of the above."
  exit 0
fi
export EMULATOR
toolchain=$("$python" -m tools.cross aarch64)
# Without -Werror: `make test` checks g++'s warnings, and clang's differ.
"$tools/cmake" -Snative "-B$build" -GNinja -DCMAKE_BUILD_TYPE=Release -DSPARKHVD_WERROR=OFF \
  "-DCMAKE_MAKE_PROGRAM=$tools/ninja" "-DCMAKE_TOOLCHAIN_FILE=$toolchain"
"$tools/cmake" --build "$build" --target check
