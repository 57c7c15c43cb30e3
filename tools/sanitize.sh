#!/bin/sh
# Build the native module with AddressSanitizer and UBSan into build/sanitize and run the kernel
# tests on it. The build is not optimised away: -O1 keeps it quick, every level is covered.
#   tools/sanitize.sh [pytest arguments]      PYTHON=python3 by default
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tree=build/sanitize
cmake -S . -B "$tree" -DPython_EXECUTABLE="$(command -v "$python")" \
    -DOCTAVO_SANITIZE=ON -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$tree/src/octavo/kernels/cpu" >"$tree.log" 2>&1 ||
    { cat "$tree.log"; exit 1; }
cmake --build "$tree" -j "${JOBS:-2}"
# The package beside the module: the sanitised tree never touches the one in src/.
cp -r src/octavo "$tree/src/.octavo.new"
rm -f "$tree/src/.octavo.new"/kernels/cpu/_native*.so
cp "$tree"/src/octavo/kernels/cpu/_native*.so "$tree/src/.octavo.new/kernels/cpu/"
rm -rf "$tree/src/octavo"
mv "$tree/src/.octavo.new" "$tree/src/octavo"
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$tree/CMakeCache.txt")
# Python itself leaks at exit; the shared runtime must come first.
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
    UBSAN_OPTIONS=print_stacktrace=1 \
    PYTHONPATH="$tree/src" PYTHONDONTWRITEBYTECODE=1 \
    "$python" -m pytest tests/kernels -q -p no:cacheprovider -k cpu "$@"
