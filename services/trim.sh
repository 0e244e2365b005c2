#!/bin/sh
# Removes what an image does not need of a virtual environment: pip, tests, headers, static libraries, and of TensorFlow
# the symbols that only debuggers read and what only compiles its graphs ahead of time. Usage: trim.sh VENV
set -eu
cd "$1/lib"/python3.*/site-packages
rm -rf pip pip-* clang libclang-* tensorflow/include tensorflow/xla_aot_runtime_src
find . -depth -type d -name tests -exec rm -rf {} +
find . -name '*.a' -delete
if [ -d tensorflow ]; then find tensorflow -name '*.so*' -type f -exec strip --strip-unneeded {} +; fi
