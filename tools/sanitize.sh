#!/bin/sh
# Build the native module with AddressSanitizer and UBSan into build/sanitize and run the tests of
# kernels and sampler on it, on every level of this machine. -O1 keeps the build quick.
#   [TESTS="tests/kernels tests/sampling"] [PYTHON=python3] tools/sanitize.sh [pytest arguments]
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tree=build/sanitize
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
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
# Python itself leaks at exit; the shared runtime must come first. -S: the hook of an editable
# install would put the ordinary module before the sanitised one.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH="$PWD/$tree/src:$packages" PYTHONDONTWRITEBYTECODE=1
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
export LD_PRELOAD
"$python" -S -c 'import sys; from octavo.kernels.cpu import _native, available_levels as levels
print("sanitised:", *levels(), flush=True); sys.exit(not _native.__file__.startswith(sys.argv[1]))' \
    "$PWD/$tree/" || { echo "sanitize: not the sanitised module was imported" >&2; exit 1; }
# shellcheck disable=SC2086  # TESTS are several words
exec "$python" -S -m pytest ${TESTS:-tests/kernels tests/sampling} -q -p no:cacheprovider "$@"
