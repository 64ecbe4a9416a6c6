#!/bin/sh
# Run the tests of exactness under other versions of transformers:   tests/versions.sh 4.57.6 5.12.1
# Each goes, with what it needs, into a temporary directory in front of the packages that are installed.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
for version in "$@"; do
    directory=$(mktemp -d)
    trap 'rm -rf "$directory"' EXIT
    "$PYTHON" -m pip install --quiet --target "$directory" "transformers==$version"
    PYTHONPATH=$directory "$PYTHON" -c 'import transformers; print("transformers", transformers.__version__)'
    PYTHONPATH=$directory "$PYTHON" -m pytest -q -p no:cacheprovider tests/models tests/test_exactness.py tests/test_kernels.py
    rm -rf "$directory"
done
