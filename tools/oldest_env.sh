#!/usr/bin/env bash
# Creates the environment of `make test-oldest`: oldest_env.sh <python of the main environment> <folder>.
#
# petastorm 0.13.1 needs pyarrow below 15, numpy below 2 and setuptools below 70, which current pyspark and torch do not
# support. So these are installed here, and the rest (torch, pandas, pytest) comes from the main environment, by the last entry
# of the path. That needs the same Python. If there is no pyarrow 14 for it, this exits with status 3 and a message.
set -euo pipefail

main=${1:?the Python of the main environment}
folder=${2:?the folder of the new environment}

if ! "$main" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'; then
  echo "test-oldest: skipped, because pyarrow 14 and numpy 1.26 have no wheels for $("$main" --version)" >&2
  exit 3
fi

echo "test-oldest: installing pyspark 3.5, pyarrow 14, numpy 1.26 and petastorm into $folder"
rm -rf "$folder"
# The base Python of the main environment.
"$main" -c 'import sys, venv; venv.EnvBuilder(with_pip=True, symlinks=True).create(sys.argv[1])' "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --no-cache-dir -q "$@"; }
pip install "pyspark==3.5.*" "pyarrow==14.0.2" "numpy==1.26.4" "setuptools<70" \
  dill diskcache fsspec future packaging psutil pyzmq six "opencv-python-headless<4.12"
# Its own pins do not all exist for new Pythons.
pip install --no-deps "petastorm==0.13.1"
# Jars of Iceberg's Spark runtime, for tests of tables.
pip install --no-deps "snowpark-connect-deps-iceberg==1.0.*"

site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$main" > "$(site "$folder/bin/python")/zz_main_environment.pth"
