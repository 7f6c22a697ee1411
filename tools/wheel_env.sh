#!/usr/bin/env bash
# Creates an environment that builds wheels and compiles for other machines (`make wheel`).
#
# Separate from .venv: zig alone takes 400 MB, and only wheels and the tests of aarch64 need it. Usage:
# tools/wheel_env.sh <python> <folder>
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1
folder=$2

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }
echo "make wheel: installing zig and auditwheel into $folder"
# --group needs pip 25.1.
pip install -q "pip>=25.1" || { echo "make wheel: could not install pip 25.1 or newer; see above." >&2; exit 1; }
pip install -q --group wheel || { echo "make wheel: could not install the group 'wheel' of pyproject.toml; see above." >&2; exit 1; }
