#!/usr/bin/env bash
# Creates .venv and installs the package into it, editable, with its test extras (`make env`).
#
# Writes nothing outside the checkout and the temporary folder: pip runs without a cache. Takes from the
# Makefile: VENV, PYTHON, TORCH, TORCH_INDEX.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
torch=${TORCH:?is set by the Makefile}
torch_index=${TORCH_INDEX-}

fail() {
  echo "make env: $*" >&2
  exit 1
}

# The Python that the environment is made from: $PYTHON, else the first of these that is new enough.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
    then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python) || fail "needs Python 3.10 to 3.13 and found ${PYTHON:-none}" \
    "($(python3 --version 2>&1 || true)): install one, for example with \`apt-get install python3 python3-venv\`," \
    "and name it with \`make env PYTHON=python3.12\`."
  # Debian and Ubuntu keep ensurepip in a package of its own; without it venv fails half-way.
  "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python has no venv module:" \
    "run \`apt-get install python3-venv\` (as root), then \`make env\` again."
  "$python" -m venv "$venv"
fi

python=$venv/bin/python
say() { echo "make env: $*"; }
pip() { "$python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }

if ! "$python" -c 'import torch' 2>/dev/null; then
  # pip prefers the CPU build of a version, 2.x.y+cpu, wherever an index or folder that it knows has one.
  index=()
  [ -z "$torch_index" ] || index=(--extra-index-url "$torch_index")
  say "installing $torch"
  pip install -q ${index[@]+"${index[@]}"} "$torch" || fail "could not install $torch with pip:" \
    "choose another version with \`make env TORCH=torch==2.x.y\`, or see pip's message above."
fi

say "installing sparkhvd with its test extras, and building the native library (a few minutes)"
# Built without isolation, so that the library is compiled once, in build/native, and again only where changed.
pip install -q "setuptools>=77" wheel "cmake>=3.22" ninja || fail "could not install the build tools; see pip's message above."
pip install -q --no-build-isolation -e ".[test,dev]" || fail "could not install sparkhvd; the last lines above say why."
