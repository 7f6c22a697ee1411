#!/usr/bin/env bash
# Creates the environment of `make fuzz` with atheris: fuzz_env.sh <python of the main environment> <folder>.
#
# The rest comes from the main environment, by the last entry of the path. Exit status 3 means that pip finds no atheris for this Python; the reason is
# printed.
set -euo pipefail

main=${1:?the Python of the main environment}
folder=${2:?the folder of the new environment}

say() { echo "fuzz-env: $*" >&2; }
say "installing atheris into $folder"
rm -rf "$folder"
# The base Python of the main environment.
"$main" -c 'import sys, venv; venv.EnvBuilder(with_pip=True, symlinks=True).create(sys.argv[1])' "$folder"
python=$folder/bin/python
if ! "$python" -m pip --disable-pip-version-check --no-cache-dir install -q --no-deps --only-binary atheris "atheris>=2.3,<4" 2> >(tee "$folder/pip.log" >&2); then
  # Any other failure, such as a full disk, is one of this script.
  reason=$(grep -o -m 1 'No matching distribution found.*' "$folder/pip.log") || exit 1
  say "skipped: $reason"
  exit 3
fi
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Add the checkout: the file with the main environment's path to it is not read here.
{ site "$main"; realpath "$(dirname "${BASH_SOURCE[0]}")/.."; } > "$(site "$python")/zz_main_environment.pth"
