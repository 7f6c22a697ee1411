#!/usr/bin/env bash
# Creates an environment with another torch: torch_env.sh <python of the main environment> <folder> <torch==2.x.y>.
#
# Installs only torch and the libraries that it is linked against. The rest comes from the main environment, by the last entry
# of the path. Without triton (0.9 GB) and bytecode this takes half the time of `pip install torch`. Exit status 3
# means that pip finds no such version; the reason is printed.
set -euo pipefail

main=${1:?the Python of the main environment}
folder=${2:?the folder of the new environment}
torch=${3:?the requirement, such as torch==2.14.1}

say() { echo "torch-env: $*" >&2; }
python=$folder/bin/python
install() { "$python" -m pip --disable-pip-version-check --no-cache-dir install -q --no-compile "$@" 2> >(tee "$folder/pip.log" >&2); }
index=()
[ -z "${TORCH_INDEX-}" ] || index=(--extra-index-url "$TORCH_INDEX")

say "installing $torch into $folder"
rm -rf "$folder"
# The base Python of the main environment.
"$main" -c 'import sys, venv; venv.EnvBuilder(with_pip=True, symlinks=True).create(sys.argv[1])' "$folder"
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
mkdir -p "$folder"
if ! install ${index[@]+"${index[@]}"} --no-deps "$torch"; then
  # Any other failure, such as a full disk, is one of this script.
  reason=$(grep -o -m 1 'No matching distribution found.*\|.*conflict.*' "$folder/pip.log") || exit 1
  say "skipped $torch: $reason"
  exit 3
fi
# Its requirements for CUDA; CPU builds have no such requirements.
mapfile -t cuda < <("$python" -c '
import importlib.metadata
for requirement in importlib.metadata.requires("torch"):
    if requirement.startswith(("nvidia-", "cuda-toolkit")):
        print(requirement)')
[ ${#cuda[@]} -eq 0 ] || install "${cuda[@]}"
# Add the checkout: the file with the main environment's path to it is not read here.
{ site "$main"; realpath "$(dirname "${BASH_SOURCE[0]}")/.."; } > "$(site "$python")/zz_main_environment.pth"
# Not imported: the main environment may still be without what torch imports.
"$python" -c 'import importlib.metadata; print("torch", importlib.metadata.version("torch"))'
