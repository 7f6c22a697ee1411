#!/usr/bin/env bash
# Creates the environment of `make docs`: docs_env.sh <folder>. mkdocs reads the sources, so the package and torch need not be installed.
# Variable of the Makefile: PYTHON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:?the folder of the new environment}

[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }
echo "make docs: installing mkdocs into $folder"
# --group needs pip 25.1.
pip install -q "pip>=25.1" && pip install -q --group docs
