#!/bin/sh
# SPDX-License-Identifier: MIT
# Tests the rows of some architectures on this CPU, each with every case, and writes tests/results/NAME.txt.
#   tests/kernel/record.sh NAME ARCH... [BUILD=FOLDER] [RESULTS=FOLDER]
# as in: tests/kernel/record.sh zen4 avx512bf16 avx512
set -eu
cd "$(dirname "$0")/../.."
name=$1
shift
build=build/release results=tests/results archs=
for word; do
    case $word in
        BUILD=*) build=${word#BUILD=} ;;
        RESULTS=*) results=${word#RESULTS=} ;;
        *) archs="$archs $word" ;;
    esac
done
file=$results/$name.txt said=$(mktemp) failed=0
trap 'rm -f "$said"' EXIT
known='avx2|avx512f|avx512_bf16|amx_(tile|bf16|fp16)'
features=$(grep -m 1 ^flags /proc/cpuinfo | tr ' ' '\n' | grep -xE "$known" | xargs)
{
    echo "cpu      $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $features, $(nproc) threads"
    echo "kernel   $(uname -s) $(uname -r | cut -d- -f1)"
    echo "compiler $("${CXX:-g++}" --version | head -1)"
    echo "date     $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    echo "source   $(find include src cuda -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12)"
} > "$file"
for arch in $archs; do
    for test in "test_kernel_rows every_row_computes_attention" test_kernel_rounding \
        "test_kernel_axes rows_read_any_axis"; do
        printf '\n$ SPATTN_TEST_ROWS=%s_ %s\n' "$arch" "$test" >> "$file"
        # shellcheck disable=SC2086
        SPATTN_TEST_ROWS=${arch}_ "$build"/tests/$test > "$said" 2>&1 || failed=1
        sed '/^SKIPPED/d' "$said" >> "$file"  # a row that is not here says so in each case; the last line counts them
    done
done
cat "$file"
exit $failed
