#!/usr/bin/env bash
# The two halves of `make env`: `env.sh build-tools` creates .venv with the tools that compile the native library, `env.sh packages`
# installs torch and the package itself, editable, with its test extras.
#
# Writes nothing outside the checkout and the temporary folder: pip runs without a cache. Variables of the
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

# The base Python of the environment: $PYTHON, else the first of these that is new enough.
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

python=$venv/bin/python
wheels=build/wheels-of-env
# Most installed files are never imported. Imported ones are compiled at import, and the bytecode is kept.
install() { pip install -q --no-compile "$@"; }
say() { echo "make env: $*"; }
pip() { "$python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }

create_venv() {
  local base
  base=$(find_python) || fail "needs Python 3.10 to 3.13 and found ${PYTHON:-none}" \
    "($(python3 --version 2>&1 || true)): install one, for example with \`apt-get install python3 python3-venv\`," \
    "and name it with \`make env PYTHON=python3.12\`."
  # Debian and Ubuntu keep ensurepip in a package of its own; without it venv fails half-way.
  "$base" -c 'import ensurepip, venv' 2>/dev/null || fail "$base has no venv module:" \
    "run \`apt-get install python3-venv\` (as root), then \`make env\` again."
  "$base" -m venv "$venv"
}

install_build_tools() {
  [ -x "$python" ] || create_venv
  install "setuptools>=77" wheel "cmake>=3.22" ninja || fail "could not install the build tools; see pip's message above."
  # Before minutes of downloads.
  local problem
  problem=$("$python" -c 'import setup; setup.compiler()' 2>&1) || fail "${problem##*BuildProblem: }"
}

# pip packs 400 MB of pyspark into a wheel, on one core.
build_pyspark() {
  local requirement
  requirement=$(grep -o 'pyspark\[connect\][^"]*' pyproject.toml)
  pip wheel -q --no-deps --wheel-dir "$wheels" "$requirement"
}

install_packages() {
  local building= packages=(--no-build-isolation)
  # Without the library: make compiles it, once, in build/native.
  export SPARKHVD_BUILD_ENGINE=0
  if ! "$python" -c 'import pyspark' 2>/dev/null; then
    rm -rf "$wheels"
    build_pyspark &
    building=$!
    # A failure elsewhere must not leave pip running.
    trap "kill $building 2>/dev/null || true" EXIT
    packages+=(--find-links "$wheels")
  fi
  if ! "$python" -c 'import torch' 2>/dev/null; then
    # pip prefers the CPU build of a version, 2.x.y+cpu, wherever an index or folder that it knows has one.
    local index=()
    [ -z "$torch_index" ] || index=(--extra-index-url "$torch_index")
    say "installing $torch"
    install ${index[@]+"${index[@]}"} "$torch" || fail "could not install $torch with pip:" \
      "choose another version with \`make env TORCH=torch==2.x.y\`, or see pip's message above."
  fi
  say "installing sparkhvd with its test extras (a few minutes)"
  if [ -n "$building" ]; then
    # With the pandas of the extra `spark`.
    install --no-build-isolation -e ".[test-tools]" "pandas<3" || fail_to_install
    wait "$building" || fail_to_install
    trap - EXIT
  fi
  install "${packages[@]}" -e ".[test,dev]" || fail_to_install
  rm -rf "$wheels"
}

fail_to_install() {
  fail "could not install sparkhvd; the last lines above say why."
}

case ${1-} in
  build-tools) install_build_tools ;;
  packages) install_packages ;;
  *) fail "env.sh: expected build-tools or packages, got '${1-}'" ;;
esac
