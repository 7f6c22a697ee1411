#!/usr/bin/env bash
# Creates the environment of `make test-users`: users_env.sh <python of the main environment> <folder> [version of torch].
#
# Lightning, Accelerate, transformers, PEFT, TRL, MLflow, TensorBoard, ONNX and FastAPI are installed here, and torch if a version is given. The rest comes from the
# main environment, by the last entry of the path. Because pip would install torch again for them, their other requirements are listed here.
# Variable of the Makefile: TORCH_INDEX.
set -euo pipefail

main=${1:?the Python of the main environment}
folder=${2:?the folder of the new environment}
torch=${3-}

echo "test-users: installing ${torch:+torch $torch, }lightning, accelerate, transformers, peft, trl, mlflow, tensorboard, onnx and fastapi into $folder"
rm -rf "$folder"
# The base Python of the main environment.
"$main" -c 'import sys, venv; venv.EnvBuilder(with_pip=True, symlinks=True).create(sys.argv[1])' "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --no-cache-dir -q "$@"; }
if [ -n "$torch" ]; then
  pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$torch"
fi
pip install "huggingface-hub>=0.30" "safetensors>=0.4.3" "tokenizers>=0.21" "tqdm>=4.60" regex typer
pip install --no-deps "lightning>=2.4,<3" "pytorch-lightning>=2.4,<3" "lightning-utilities>=0.10" "accelerate>=1,<2" \
  "transformers>=4.50,<6" "peft>=0.15,<1" "trl>=0.20,<2" "torchdata>=0.8"

site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Add the checkout: the file with the main environment's path to it is not read here.
{ site "$main"; realpath "$(dirname "${BASH_SOURCE[0]}")/.."; } > "$(site "$folder/bin/python")/zz_main_environment.pth"
# Most of their other requirements are now installed.
pip install "datasets>=3,<6" "mlflow>=3,<4" "tensorboard>=2.14,<3" "onnx>=1.17,<2" "onnxscript>=0.6,<1" "onnxruntime>=1.19,<2" \
  "fastapi>=0.110,<1" "httpx>=0.27,<1"
# Its Manager takes native groups since October 2026; with torch 2.13 its test is skipped.
pip install --no-deps "torchft-nightly>=2026.10.1"
pip install "opentelemetry-exporter-otlp-proto-http>=1.39" "opentelemetry-sdk>=1.39"
