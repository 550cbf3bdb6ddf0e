#!/usr/bin/env bash
# Put the packages that the lent machine lacks into .site, which travels with the working tree.
# usage: scripts/gpu_day/packages.sh [PYTHON_VERSION]      # that machine has 3.12, torch 2.11 with CUDA 13.0, transformers, peft, pytest
set -euo pipefail
cd "$(dirname "$0")/../.."
version=${1:-3.12}
lacking=(jsonargparse docstring-parser prompt-toolkit wcwidth lightning-fabric bitsandbytes)
rm -rf .site .whl
platforms=()
for platform in manylinux_2_28_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do
    platforms+=(--platform "$platform")
done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp "${platforms[@]}" \
    -d .whl "${lacking[@]}"
python3 -m pip install -q --no-deps --no-compile --target .site --python-version "$version" --only-binary=:all: \
    --implementation cp "${platforms[@]}" .whl/*.whl
rm -rf .whl
# bitsandbytes carries a library for every CUDA; one is 8 to 14 MB
find .site/bitsandbytes -name 'libbitsandbytes_*.so' ! -name 'libbitsandbytes_cuda130.so' ! -name 'libbitsandbytes_cpu.so' -delete
find .site -name __pycache__ -prune -exec rm -rf {} +
du -sh .site | cut -f 1
ls .site
