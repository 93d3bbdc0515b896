#!/usr/bin/env bash
# Tests and measures on a real GPU, and writes all of it to target/gpu-report.md (or the file that is named): the doctor, the tests,
# the Python package's, compute-sanitizer where it is installed, `towline bench --gpu`, and the figures of towline-testkit-gpu.
# `make test-gpu` runs it. Three minutes, and the time that building takes.
#
# TOWLINE_GPU_BIN names a folder with the programs where they were built elsewhere: gpu (the tests), towline,
# towline-testkit-gpu, towline-testkit-worker, and python, a folder with the package and pytest where python3 has none.
# TOWLINE_GPU_PYTHON is the interpreter with torch and CuPy (python3).
set -uo pipefail
cd "$(dirname "$0")/.."
target_dir=${CARGO_TARGET_DIR:-target}
report=${1:-$target_dir/gpu-report.md}
mkdir -p "$(dirname "$report")"
bin=${TOWLINE_GPU_BIN:-}
python=${TOWLINE_GPU_PYTHON:-python3}
[[ -e /dev/nvidiactl || -e /dev/dxg ]] || { echo "there is no NVIDIA GPU here" >&2; exit 3; }
if [[ -z $bin ]]; then
  cargo build --release -p towline-testkit -p towline-cli --bins || exit 1
  cargo test --release -p towline-testkit --test gpu --no-run || exit 1
  bin=$target_dir/release
  built=$(find "$bin/deps" -maxdepth 1 -name 'gpu-*' -executable -type f -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
  ln -sf "$(realpath "$built")" "$bin/gpu"
  if "$python" -c 'import torch' 2>/dev/null; then
    # Torch stays where it is; the package goes into an environment of its own.
    venv=$(realpath -m "$target_dir/gpu-venv")
    "$python" -m venv --system-site-packages "$venv" &&
      "$venv/bin/python" -m pip install --quiet 'maturin>=1.16,<2' pytest &&
      VIRTUAL_ENV=$venv "$venv/bin/maturin" develop --release --manifest-path bindings/python/Cargo.toml || exit 1
    python=$venv/bin/python
  fi
fi
bin=$(realpath "$bin")
[[ -d $bin/python ]] && export PYTHONPATH=$bin/python${PYTHONPATH:+:$PYTHONPATH}
export TOWLINE_REQUIRE=cuda TOWLINE_TESTKIT_WORKER=$bin/towline-testkit-worker
status=0
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)

# step SECONDS COMMAND…: its output goes to the report, and its failure to the end of this script.
step() {
  local limit=$1 began=$SECONDS
  shift
  echo '```'
  timeout "$limit" "$@" 2>&1
  local ended=$?
  echo '```'
  echo
  if ((ended != 0)); then
    echo "**Ended with $ended.**"
    echo
    status=1
  fi
  echo "$((SECONDS - began)) s: $*" >&2
}

# One tool over the tests of the copy kernels: its own words, and the outcome of the tests.
sanitized() {
  local tool=("$1")
  shift
  # The driver's refusals are part of the tests.
  [[ ${tool[0]} == memcheck ]] && tool+=(--report-api-errors no)
  "$sanitizer" --tool "${tool[@]}" --error-exitcode 9 --target-processes application-only "$bin/gpu" --test-threads 1 "$@" |
    grep -E '^=========|^test result|FAILED|panicked'
}

{
  echo "# What a real GPU says"
  echo
  echo "Written by \`scripts/gpu-report.sh\`: commit ${TOWLINE_COMMIT:-$(git rev-parse --short HEAD)}, $(date -u +%Y-%m-%d),"
  echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1), $(nproc) cores."
  echo
  echo "## What the doctor finds"
  step 30 bash -c "'$bin/towline' doctor | sed -n '/^GPUs/,/^\$/p; /^  .. cuda /p'"
  echo "## Tests (\`TOWLINE_REQUIRE=cuda\`)"
  # That test holds up a stream by a function of the host's, and the driver lets whoever frees memory wait for all streams.
  alone=a_copy_waits_for_a_stream_and_holds_one_back
  step 120 "$bin/gpu" --test-threads 8 --skip $alone
  step 30 "$bin/gpu" $alone
  echo "## Python (torch, CuPy; \`pytest -s bindings/python/tests/test_cuda.py\`)"
  step 90 "$python" -m pytest -p no:cacheprovider -q -s bindings/python/tests/test_cuda.py
  echo "## compute-sanitizer over the copy kernels"
  if [[ -n $sanitizer ]]; then
    export -f sanitized
    export sanitizer bin
    # The copies themselves, and the laws about blocks on the paths where a kernel copies.
    kernels='runs_of_any blocks_of_one_length blocks_are_copied lists_longer nothing_to_copy'
    laws='cuda_to_gpu::blocks_ cuda_to_pinned::blocks_ inproc_on_gpu::blocks_ mapped_to_gpu::blocks_'
    step 40 bash -o pipefail -c "sanitized memcheck $kernels $laws"
    step 30 bash -o pipefail -c "sanitized racecheck blocks_of_one_length blocks_are_copied $laws"
    step 20 bash -o pipefail -c 'sanitized initcheck blocks_of_one_length'
  else
    echo "Not run: there is no compute-sanitizer here."
    echo
  fi
  echo "## \`towline bench --gpu\`"
  step 120 "$bin/towline" bench --gpu --quick
  echo "## Transfers between two processes, beside the limit in the same run"
  step 90 "$bin/towline-testkit-gpu"
} >"$report"
exit "$status"
