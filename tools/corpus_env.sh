#!/usr/bin/env bash
# Creates the environment of `make corpus`: corpus_env.sh <python of the main environment> <folder>.
#
# Installs the libraries of tests/corpus/requirements.txt. The rest, with torch, comes from the main environment, by the last entry of
# the path: pip sees it there, and does not install torch again. Variable of the Makefile: TORCH_INDEX.
set -euo pipefail

main=${1:?the Python of the main environment}
folder=${2:?the folder of the new environment}
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")

echo "corpus: installing tests/corpus/requirements.txt and torchvision into $folder"
rm -rf "$folder"
# The base Python of the main environment.
"$main" -c 'import sys, venv; venv.EnvBuilder(with_pip=True, symlinks=True).create(sys.argv[1])' "$folder"
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Add the checkout: the file with the main environment's path to it is not read here.
{ site "$main"; echo "$root"; } > "$(site "$folder/bin/python")/zz_main_environment.pth"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --no-cache-dir -q "$@"; }
# Torchvision 0.28 belongs to torch 2.13, and so on.
vision=$("$main" -c 'import torch; print(int(torch.__version__.split(".")[1]) + 15)')
pip install --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torchvision==0.$vision.*"
pip install -r "$root/tests/corpus/requirements.txt"
# A torchvision built for CUDA loads none of its compiled operations beside a torch for CPUs, and its import fails at those that it
# describes nevertheless. No case needs them.
sed -i -E 's/^@(torch\.library\.register_fake\("torchvision::[a-z]+"\))$/@(\1 if torchvision.extension._has_ops() else (lambda f: f))/' \
  "$(site "$folder/bin/python")/torchvision/_meta_registrations.py"
"$folder/bin/python" -c 'import torch, torchvision, transformers; print("corpus: torch", torch.__version__)'
