#!/usr/bin/env bash
# Prints the command that runs programs of Linux aarch64 here: qemu-user with the C library of aarch64.
#
# Searches PATH and /usr/aarch64-linux-gnu. If they are missing, installs both with apt if possible (root on Debian or
# Ubuntu), else prints what to run (exit status 1). Prints nothing on an aarch64 machine.
set -euo pipefail

readonly LIBRARIES=/usr/aarch64-linux-gnu

find_qemu() {
  local program
  [ -e "$LIBRARIES/lib/ld-linux-aarch64.so.1" ] || return 1
  program=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || return 1
  echo "$program -L $LIBRARIES"
}

if [ "$(uname -m)" = aarch64 ] || find_qemu; then exit 0; fi
if ! command -v apt-get >/dev/null; then
  echo "needs qemu-user and the C library of aarch64 and found none: install qemu-aarch64 with your package manager" \
    "and an aarch64 glibc in $LIBRARIES." >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "needs qemu-user and the C library of aarch64 and found none: run" \
    "\`sudo apt-get install -y qemu-user-static libc6-arm64-cross\`." >&2
  exit 1
fi
echo "No qemu-user found; installing it with apt-get." >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2 || true
# Newer releases include the static build only in qemu-user.
for package in qemu-user-static qemu-user; do
  if apt-get install -y -qq --no-install-recommends "$package" libc6-arm64-cross >&2 && find_qemu; then exit 0; fi
done
echo "needs qemu-user and libc6-arm64-cross, and apt-get could not install them: see its message above." >&2
exit 1
