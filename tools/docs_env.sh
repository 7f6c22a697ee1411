#!/usr/bin/env bash
# Creates the environment of `make docs`: docs_env.sh <python> <folder>. mkdocs reads the sources, so the package and torch need not be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${1:?a Python}
folder=${2:?the folder of the new environment}

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }
echo "make docs: installing mkdocs into $folder"
# --group needs pip 25.1.
pip install -q "pip>=25.1" && pip install -q --group docs
