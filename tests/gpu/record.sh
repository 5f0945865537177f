#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds, runs the GPU tests, 20,000 problems drawn at random and 1,000 large ones, runs some of the first two again
# under compute-sanitizer's tools, and writes tests/results/<gpu>.txt.
#   tests/gpu/record.sh [BUILD_FOLDER] [RESULTS_FOLDER]
# Programs run side by side, since each waits for its truths on the CPU most of the time; those under tools follow.
# SPATTN_TEST_EVERY=n runs one case of n, SPATTN_TEST_PROBLEMS=n as many problems; SPATTN_TEST_TOOLS names the tools.
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build} results=${2:-tests/results}
cmake -S . -B "$build" -DSPATTN_CUDA=ON -DSPATTN_TESTS=ON -DCMAKE_BUILD_TYPE=Release > /dev/null
cmake --build "$build" -j "$(nproc)" --target test_gpu test_random > "$build/build.log" 2>&1 || {
    tail -50 "$build/build.log"
    exit 1
}
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
file=$results/$(echo "$gpu" | tr 'A-Z' 'a-z' | sed 's/nvidia //; s/[^a-z0-9]/_/g').txt
test=$build/tests/test_gpu random="$build/tests/test_random --device cuda"
parts=$(mktemp -d)
# A run that is stopped leaves what its parts have said so far.
finish() {
    cat "$parts"/[0-9]* >> "$file" 2> /dev/null || true
    rm -rf "$parts"
}
trap finish EXIT
trap 'kill $(jobs -p) 2> /dev/null; exit 143' INT TERM
mkdir -p "$results"
{
    echo "gpu      $gpu"
    echo "driver   $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)"
    nvcc=$(sed -n 's/^SPATTN_NVCC:FILEPATH=//p' "$build/CMakeCache.txt")
    echo "toolkit  $("$nvcc" --version | sed -n 's/.*release/nvcc/p')"
    echo "date     $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    echo "source   $(find include src cuda -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12)"
    [ -z "${SPATTN_TEST_EVERY:-}" ] || echo "cases    one of $SPATTN_TEST_EVERY"
} > "$file"

# part TITLE COMMAND...: begins a part of the record.
count=0
part() {
    count=$((count + 1))
    here=$parts/$(printf %02d $count) title=$1
    shift
    {
        printf '\n$ %s\n' "$title"
        "$@" 2>&1 || touch "$parts/failed"
    } > "$here" &
}

problems=${SPATTN_TEST_PROBLEMS:-20000}
# Most of its time go tests whose truths are long sums: those run beside each other, and all others beside them.
apart="tensor_core_rows tensor_core_rows_backward tensor_core_rows_of_lists tensor_core_rows_of_lists_backward
    deterministic_gradients_have_the_same_bits sequences_of_very_different_lengths few_queries_on_keys_in_many_runs
    many_tasks_backward misaligned_views misaligned_views_backward operands_of_float8 operands_of_float8_backward
    attention_of_ranks_is_that_of_one_device"
for name in $apart; do part "test_gpu $name" "$test" "$name"; done
# shellcheck disable=SC2046
part "test_gpu, all others" "$test" $(sed -n 's/^TEST(\([a-z_0-9]*\)).*/\1/p' tests/gpu/*.cpp |
    grep -vxF "$(printf '%s\n' $apart)")
# shellcheck disable=SC2086
part "test_random --device cuda --problems $problems" $random --problems "$problems"
large="--large --problems $(((problems + 19) / 20)) --seconds 300"
# shellcheck disable=SC2086
part "test_random --device cuda $large" $random $large
wait

# What takes minutes under a tool is left out: long rows.
cases="tensor_core_rows tensor_core_rows_backward tensor_core_rows_of_lists tensor_core_rows_of_lists_backward
    orders_by_tensor_cores plain_rows options_of_all_plain_rows values_in_keys isolation misaligned_views scales
    small_heads_and_blocks two_streams_at_once graph_capture_and_replay allocator_hooks_are_honoured
    tokens_go_to_their_places"
# One case of 11: a number that shares a factor with those of patterns (14) or lengths (13) would miss most of them.
# Small problems: under a tool a kernel takes a hundred times as long.
small="--problems 250 --work 3e6 --tokens 600 --patience 200"
for tool in ${SPATTN_TEST_TOOLS-memcheck racecheck initcheck synccheck}; do
    check="compute-sanitizer --tool $tool --error-exitcode 3 --print-limit 20"
    # shellcheck disable=SC2086
    part "compute-sanitizer --tool $tool test_gpu ..." \
        env SPATTN_TEST_EVERY="${SPATTN_TEST_EVERY:-11}" $check "$test" $cases
    case $tool in memcheck | racecheck)
        # shellcheck disable=SC2086
        part "compute-sanitizer --tool $tool test_random --device cuda $small" $check $random $small
        ;;
    esac
done
wait
cat "$parts"/[0-9]*
[ ! -e "$parts/failed" ]
