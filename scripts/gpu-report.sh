#!/usr/bin/env bash
# Tests and measures on a real GPU, and writes docs/gpu-transfers.md. TOWLINE_GPU_BIN names a folder with the programs where they
# were built elsewhere: gpu (the tests), towline-testkit-gpu and towline-testkit-worker.
set -uo pipefail
cd "$(dirname "$0")/.."
report=${1:-docs/gpu-transfers.md}
bin=${TOWLINE_GPU_BIN:-}
if [[ -z $bin ]]; then
  cargo build --release -p towline-testkit --bins || exit 1
  cargo test --release -p towline-testkit --test gpu --no-run || exit 1
  bin=target/release
  ln -sf "$(find target/release/deps -maxdepth 1 -name 'gpu-*' -executable -type f -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2 | xargs realpath)" "$bin/gpu"
fi
bin=$(realpath "$bin")
bare=()
if nvcc -arch=native -ptx crates/towline-testkit/examples/gpu-copy/bare.cu -o "${TMPDIR:-/tmp}/bare.ptx"; then
  bare=("${TMPDIR:-/tmp}/bare.ptx")
fi
export TOWLINE_REQUIRE=cuda TOWLINE_TESTKIT_WORKER=$bin/towline-testkit-worker
{
  echo "# What a real GPU says"
  echo
  echo "Written by \`scripts/gpu-report.sh\`: commit ${TOWLINE_COMMIT:-$(git rev-parse --short HEAD)}, $(date -u +%Y-%m-%d),"
  echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader), $(nproc) cores."
  echo
  echo "## Transfers between two processes, beside the limit in the same run"
  echo '```'
  timeout 300 "$bin/towline-testkit-gpu" "${bare[@]}" 2>&1
  echo '```'
  echo
  echo "## Tests (\`TOWLINE_REQUIRE=cuda\`)"
  echo '```'
  # That test holds up a stream by a function of the host's, and the driver lets whoever frees memory wait for all streams.
  alone=a_copy_waits_for_a_stream_and_holds_one_back
  timeout 600 "$bin/gpu" --test-threads 8 --skip $alone 2>&1
  status=$?
  timeout 60 "$bin/gpu" $alone 2>&1 || status=1
  echo '```'
} > "$report"
exit "${status:-1}"
