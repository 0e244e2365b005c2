#!/bin/sh
# Removes what an image does not need of a virtual environment: pip, tests, headers, static libraries, symbols that only
# debuggers read, what only compiles TensorFlow's graphs ahead of time, Arrow's RPC and bucket clients, and AWS services
# other than S3. Usage: trim.sh VENV
set -eu
cd "$1/lib"/python3.*/site-packages
rm -rf pip pip-* clang libclang-* tensorflow/include tensorflow/xla_aot_runtime_src
rm -rf pyarrow/include pyarrow/libarrow_flight* pyarrow/libarrow_python_flight* pyarrow/_flight* pyarrow/libarrow_s3* pyarrow/_s3fs*
rm -f pyarrow/libarrow_python.so pyarrow/libarrow_python.so.*.*.* # copies: what is loaded is libarrow_python.so.N
find botocore/data -mindepth 1 -maxdepth 1 -type d ! -name 's3*' ! -name 'sts*' ! -name 'sso*' ! -name 'signin*' -exec rm -rf {} +
[ -d tensorflow ] || rm -rf setuptools setuptools-* pkg_resources _distutils_hack distutils-precedence.pth
find . -depth -type d -name tests -exec rm -rf {} +
find . -name '*.a' -delete
find . -name '*.so*' -type f ! -path '*.libs/*' -exec strip --strip-unneeded {} + # those in .libs have been patched
