#!/usr/bin/env bash
# Runs the checks and tests named on the command line, or all of them, and counts what happened.
#
#   scripts/test.sh                  everything
#   scripts/test.sh check            what is checked again and again while working: the lints, and the fast tests
#   scripts/test.sh clippy loom      only these steps
#   scripts/test.sh deep             sanitizers, Miri, loom, a transport of one file and fuzzing
#
# All steps run, also after a failure. A step that cannot run here is skipped with its reason; name it in
# TOWLINE_REQUIRE (a comma-separated list, or `all`) to make that a failure. Tests say on a line of their own
# `SKIPPED name: reason` when the machine lacks what they need; those are counted too. A test step in which
# no test ran fails. The last line is `N passed, M failed, K skipped`, where a check counts as one.
set -euo pipefail
cd "$(dirname "$0")/.."

# Everything, in two lists that are gone through side by side: each keeps about one core busy, and each builds what the other does not.
first_steps=(fmt clippy doc decisions modules typos workspace forced-tcp forced-tls forced-crc)
second_steps=(deny aarch64 loom python soak torch docs rdma)
check_steps=(fmt clippy decisions modules typos fast)
deep_steps=(loom sample asan tsan miri fuzz) # those of `make test-deep`, which take long; most need a nightly toolchain
cargo_deny_version=0.20
cargo_fuzz_version=0.13
typos_version=1.51.1
nixl_version=1.5.1
dynamo_version=1.6.1
arm=aarch64-unknown-linux-gnu

# The totals are read from the output, which must therefore be plain text.
export CARGO_TERM_COLOR=never
target_dir=${CARGO_TARGET_DIR:-target}
logs=$target_dir/test-logs
mkdir -p "$logs"

passed=0
failed=0
skipped=0 # beyond one for each line of skips
skips=()
summary=()
failures=()

# ---- the steps -------------------------------------------------------------------------------------------

# The transports are declared by their list, through which rustfmt does not look: it is given their files.
step_fmt() { check cargo fmt --all -- --check crates/towline/src/transport/*.rs; }

# With the Python package, which a mere check builds without a Python; in one graph the others are not checked twice.
step_clippy() {
  PYO3_NO_PYTHON=1 PYO3_BUILD_EXTENSION_MODULE=1 check cargo clippy --workspace --features towline-python/stubs --all-targets -- -D warnings
}

step_doc() {
  PYO3_NO_PYTHON=1 PYO3_BUILD_EXTENSION_MODULE=1 RUSTDOCFLAGS="-D warnings -D rustdoc::broken_intra_doc_links" \
    check cargo doc --workspace --features towline-python/stubs --no-deps
}

step_decisions() { check scripts/check-decisions.sh; }

step_modules() {
  if ! command -v python3 >/dev/null; then
    skip "cycles between modules" "there is no python3"
    return
  fi
  check python3 scripts/module-graph.py
}

# The advisory database is left out: it needs the network, and it can fail a change that did nothing wrong.
step_deny() {
  local deny
  if command -v cargo-deny >/dev/null; then
    deny=cargo-deny
  else
    deny=.tools/bin/cargo-deny
    # Without its optimizations, which take longer than all that it ever does here. A machine on which even that takes ten
    # minutes has better things to do.
    if [[ ! -x $deny ]] &&
      ! CARGO_PROFILE_DEV_DEBUG=none timeout 600 cargo install --debug --quiet cargo-deny --version "^$cargo_deny_version" --locked --root .tools; then
      skip cargo-deny "it is not installed, and 'cargo install cargo-deny' failed or took over ten minutes"
      return
    fi
  fi
  check "$deny" --locked check licenses bans sources
}

step_typos() {
  local typos=.venv/bin/typos
  if command -v typos >/dev/null; then
    typos=typos
  elif [[ ! -x $typos ]]; then
    if ! command -v python3 >/dev/null; then
      skip typos "it is not installed, and there is no python3 to install it with"
      return
    elif ! install_typos; then
      skip typos "it is not installed, and 'pip install typos' into .venv failed"
      return
    fi
  fi
  check "$typos"
}

install_typos() (
  lock_tools
  [[ -x .venv/bin/pip ]] || python3 -m venv .venv || return 1
  .venv/bin/pip install --quiet --disable-pip-version-check "typos==$typos_version"
)

# Until the end of this subshell nobody else changes .venv and .venv-torch.
lock_tools() {
  exec 9>"$logs/tools.lock"
  flock 9
}

step_aarch64() {
  local std
  std=$(rustc --print target-libdir --target "$arm") || std=
  if [[ ! -d $std ]]; then
    skip "aarch64 check" "the target's standard library is not installed (rustup target add $arm)"
    return
  fi
  # ring, which TLS stands on, has C and assembly that its build script compiles, also for a mere check.
  if [[ -z ${CC_aarch64_unknown_linux_gnu:-} ]] && ! command -v aarch64-linux-gnu-gcc >/dev/null; then
    skip "aarch64 check" "there is no C compiler for it (aarch64-linux-gnu-gcc, or CC_aarch64_unknown_linux_gnu)"
    return
  fi
  check cargo check --target "$arm"
}

# The core's own tests, the programs of the model and of hostile peers, and the laws over three paths that have little in common.
step_fast() {
  run_tests cargo test --no-fail-fast -p towline-proto -p towline -p towline-comm -p towline-sys --lib
  log=$logs/fast-programs.log
  run_tests cargo test --no-fail-fast -p towline-testkit --test model --test serving --test using
  log=$logs/fast-laws.log
  run_tests cargo test --no-fail-fast -p towline-testkit --test laws -- inproc mapped tcp
}

# The tests of NIXL find its wheel through the environment; without it they say so and are skipped.
step_workspace() {
  local reason
  reason=$(prepare_nixl) || echo "NIXL is not in .venv: $reason"
  VIRTUAL_ENV=$PWD/.venv run_tests cargo test --no-fail-fast
}

# Installs NIXL into .venv; otherwise says why that cannot be. Of what it needs in Python, its API uses only NumPy.
prepare_nixl() {
  lock_tools
  local libraries=(.venv/lib/python3*/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so)
  local numpy=(.venv/lib/python3*/site-packages/numpy)
  [[ ! -e ${libraries[0]} || ! -e ${numpy[0]} ]] || return 0
  if [[ ! -x .venv/bin/pip ]]; then
    command -v python3 >/dev/null || { echo "there is no python3"; return 1; }
    python3 -m venv .venv >&2 || { echo "'python3 -m venv .venv' failed"; return 1; }
  fi
  .venv/bin/pip install --quiet --disable-pip-version-check --retries 10 --no-deps "nixl-cu12==$nixl_version" >&2 ||
    { echo "'pip install nixl-cu12==$nixl_version' failed"; return 1; }
  .venv/bin/pip install --quiet --disable-pip-version-check numpy >&2 || { echo "'pip install numpy' failed"; return 1; }
}

# Unpacks the one file of the original dynamo.nixl_connect from Dynamo's wheel, whose other 75 MB are not needed; otherwise says
# why that cannot be.
prepare_original() {
  lock_tools
  local folder=.venv/share/dynamo-original wheels
  [[ ! -e $folder/dynamo/nixl_connect/__init__.py ]] || return 0
  [[ -x .venv/bin/pip ]] || { echo "there is no .venv"; return 1; }
  wheels=$(mktemp -d)
  if ! .venv/bin/pip download --quiet --disable-pip-version-check --no-deps --dest "$wheels" "ai-dynamo-runtime==$dynamo_version" >&2; then
    rm -rf "$wheels"
    echo "'pip download ai-dynamo-runtime==$dynamo_version' failed"
    return 1
  fi
  mkdir -p "$folder"
  .venv/bin/python -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract("dynamo/nixl_connect/__init__.py", sys.argv[2])' \
    "$wheels"/*.whl "$folder" || { rm -rf "$wheels"; echo "it is not in the wheel"; return 1; }
  rm -rf "$wheels"
}

# The short form of the campaigns, by the program that the tests have built. Times are reported, not judged.
step_soak() {
  local line
  # As the tests of the workspace build it, so that nothing is built again.
  check cargo test --quiet --no-run
  log=$logs/soak.log
  # For the lane of NIXL, which is there once the tests of the workspace are done.
  VIRTUAL_ENV=$PWD/.venv check "$target_dir/debug/towline" soak --quick --seconds "${SOAK_SECONDS:-75}" --html "$target_dir/soak.html"
  while IFS= read -r line; do
    skips+=("soak/$line")
  done < <(sed -nE 's/^ +skipped //p' "$log" | sort -u)
}

# ---- the deep ones: a nightly toolchain, and hours if one likes --------------------------------------------

# That a transport takes one file and one word: a copy of the sources gets both and nothing else. The new path passes the laws, and demo,
# doctor and bench know it. In deep only, because the copy has all to build: four minutes on two cores.
step_sample() {
  local target tree list=crates/towline/src/transport.rs
  mkdir -p "$target_dir/sample"
  target=$(realpath "$target_dir")/sample tree=$target/tree
  rm -rf "$tree"
  mkdir "$tree"
  tar --exclude=./target --exclude=./fuzz/target --exclude=./.git --exclude='./.venv*' --exclude=./.tools -cf - . | tar -xf - -C "$tree"
  cp crates/towline/tests/transport/sample.rs "$tree/crates/towline/src/transport/"
  sed -i '/\$then! {/s/ cma / cma sample /' "$tree/$list"
  log=$logs/sample-word.log
  check test "$(diff "$list" "$tree/$list" | grep -c '^>')" = 1
  local -x CARGO_TARGET_DIR=$target
  log=$logs/sample-list.log
  run_tests cargo test --manifest-path "$tree/Cargo.toml" -p towline --lib --no-fail-fast -- transport::tests transport::sample
  log=$logs/sample.log
  run_tests cargo test --manifest-path "$tree/Cargo.toml" -p towline-testkit --test laws --no-fail-fast sample::
  log=$logs/sample-commands.log
  run_tests cargo test --manifest-path "$tree/Cargo.toml" -p towline-cli --test commands --no-fail-fast -- demo_moves doctor_finds every_path
}

nightly=${NIGHTLY:-nightly}
host=$(rustc -vV | sed -n 's/^host: //p')
fuzz_seconds=${FUZZ_SECONDS:-60} # for all targets together
fuzz_runs=${FUZZ_RUNS:-} # of each role of a session, the user and the server, however long they take
# Their processes: while one waits for the other side, another has the core.
fuzz_jobs=${FUZZ_JOBS:-$((2 * $(nproc)))}

# Says why the nightly toolchain, or that component of it, cannot be used.
nightly_lacks() {
  local component=${1:-} installed
  rustup run "$nightly" rustc --version >/dev/null 2>&1 || { echo "there is no nightly toolchain (rustup toolchain install nightly)"; return 0; }
  [[ -n $component ]] || return 1
  installed=$(rustup component list --toolchain "$nightly" --installed 2>/dev/null) || installed=
  [[ $installed != *"$component"* ]] || return 1
  echo "the nightly toolchain lacks $component (rustup component add --toolchain $nightly $component)"
}

# The core's own tests, those in which the other side is hostile (peers and owners, their programs and their frames, somebody on the
# path), and those in which lent memory goes away. Leaks are not looked for: threads and tables that live as long as the process are meant to.
step_asan() {
  local reason
  if reason=$(nightly_lacks); then
    skip "the address sanitizer" "$reason"
    return
  fi
  # The fake CUDA driver, which the tests load, finds the sanitizer in the program.
  local -x RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=address -Clink-arg=-rdynamic" CARGO_TARGET_DIR=$target_dir/asan ASAN_OPTIONS=detect_leaks=0
  run_tests cargo "+$nightly" test -p towline-proto -p towline --lib --target "$host" --no-fail-fast
  log=$logs/asan-hostile.log
  TOWLINE_PROGRAMS=${TOWLINE_PROGRAMS:-2000} \
    run_tests cargo "+$nightly" test -p towline-testkit --test serving --test using --test hostile --test proxy --target "$host" --no-fail-fast
  log=$logs/asan-faults.log
  run_tests cargo "+$nightly" test -p towline-testkit --test faults --target "$host" --no-fail-fast -- containers walls closing
  log=$logs/asan-comm.log
  run_tests cargo "+$nightly" test -p towline-comm --test communicator --target "$host" --no-fail-fast -- hostile
  log=$logs/asan-gpus.log
  run_tests cargo "+$nightly" test -p towline-testkit --test cuda --target "$host" --no-fail-fast -- hostile::
  log=$logs/asan-lent.log
  run_tests cargo "+$nightly" test -p towline --test stream --test disk --target "$host" --no-fail-fast
}

# Without those whose order is made by fences alone, by another process, or through two mappings of one page: this sanitizer knows none
# of these (loom does the first).
step_tsan() {
  local reason
  if reason=$(nightly_lacks rust-src); then
    skip "the thread sanitizer" "$reason"
    return
  fi
  # Without backtraces: one of a panic that a test makes on purpose takes longer to write here than the test waits.
  RUST_BACKTRACE=0 RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=thread" CARGO_TARGET_DIR=$target_dir/tsan \
    TSAN_OPTIONS="suppressions=$PWD/scripts/tsan.supp ${TSAN_OPTIONS:-}" \
    run_tests cargo "+$nightly" test -Zbuild-std -p towline-proto -p towline --lib --target "$host" --no-fail-fast -- \
    transfer:: runtime::timers runtime::pool runtime::rseq session:: transport::stream route:: layout:: ticket:: wire:: \
    --skip where_look_and_copy_are_two_steps
}

# The parts without system calls, and without the assembly that hashes.
step_miri() {
  local reason
  if reason=$(nightly_lacks miri); then
    skip "Miri" "$reason"
    return
  fi
  local -x MIRIFLAGS="${MIRIFLAGS:--Zmiri-disable-isolation}" PROPTEST_CASES=${PROPTEST_CASES:-4} CARGO_TARGET_DIR=$target_dir/miri
  run_tests cargo "+$nightly" miri test -p towline-proto --lib --no-fail-fast -- \
    transfer:: wire::error wire::message layout::plan room:: error:: access:: element:: place::
  log=$logs/miri-towline.log
  run_tests cargo "+$nightly" miri test -p towline --lib --no-fail-fast -- route::
}

# Every target for its share of the time, from the corpus of the repository on.
step_fuzz() {
  local reason targets target share corpus limit longest
  if reason=$(nightly_lacks); then
    skip fuzzing "$reason"
    return
  fi
  PATH=$PWD/.tools/bin:$PATH
  if ! command -v cargo-fuzz >/dev/null &&
    ! timeout 600 cargo install --quiet cargo-fuzz --version "^$cargo_fuzz_version" --locked --root .tools; then
    skip fuzzing "cargo-fuzz is not installed, and 'cargo install cargo-fuzz' failed or took over ten minutes"
    return
  fi
  targets=${FUZZ_TARGETS:-$(cargo "+$nightly" fuzz list)}
  share=$((fuzz_seconds / $(wc -w <<<"$targets")))
  for target in $targets; do
    log=$logs/fuzz-$target.log
    corpus=(crates/*/tests/wire/corpus/"$target")
    # A target without a stored corpus begins with nothing.
    [[ -e ${corpus[0]} ]] || corpus=()
    case $target in
    server) corpus=(crates/towline-testkit/tests/serving/corpus) ;;
    user) corpus=(crates/towline-testkit/tests/using/corpus) ;;
    esac
    limit=("-max_total_time=$((share > 0 ? share : 1))")
    [[ -z $fuzz_runs || ($target != server && $target != user) ]] || limit=("-runs=$fuzz_runs" "-fork=$fuzz_jobs")
    # Threads and tables that live as long as the process are meant to: to look whether they leak takes longer than what is played.
    [[ $target != server && $target != user ]] || limit+=("-detect_leaks=0")
    # What a program is longer than this, no user plays.
    longest=4096
    [[ $target != user ]] || longest=1024
    mkdir -p "fuzz/corpus/$target"
    check cargo "+$nightly" fuzz run "$target" "fuzz/corpus/$target" "${corpus[@]}" -- \
      "${limit[@]}" "-max_len=$longest" -timeout=60 -print_final_stats=1
  done
}

# A directory of its own: the flag changes every crate, and sharing one would rebuild the world each time.
# Without link-time optimization, since loom spends its time in the tests' own code.
step_loom() {
  RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" CARGO_TARGET_DIR=$target_dir/loom CARGO_PROFILE_RELEASE_LTO=off \
    run_tests cargo test -p towline --release --lib loom --no-fail-fast
}

# The package is not among the workspace's default members, so that everything else needs no Python.
step_python() {
  local package=bindings/python reason
  if ! reason=$(prepare_python); then
    skip "the Python package" "$reason"
    return
  fi
  reason=$(prepare_nixl) || echo "NIXL is not in .venv: $reason"
  reason=$(prepare_original) || echo "dynamo.nixl_connect is not in .venv: $reason"
  local -x VIRTUAL_ENV=$PWD/.venv PYO3_PYTHON=$PWD/.venv/bin/python
  log=$logs/python-build.log
  check .venv/bin/maturin develop --features stubs --manifest-path $package/Cargo.toml
  log=$logs/python-types.log
  check .venv/bin/mypy --config-file $package/pyproject.toml $package/python/towline $package/tests examples/python docs/site
  log=$logs/python-stubs.log
  check .venv/bin/python scripts/stubs.py --check
  log=$logs/python-stubtest.log
  check .venv/bin/python -m mypy.stubtest towline._native
  log=$logs/python.log
  run_pytest .venv/bin/pytest --color=no -c $package/pyproject.toml $package/tests
}

# Debian's torch is for Debian's own Python, so it gets an environment of its own, and the package as the wheel that users get.
step_torch() {
  local package=bindings/python reason
  if ! reason=$(prepare_python && prepare_torch); then
    skip "tensors of torch" "$reason"
    return
  fi
  local -x VIRTUAL_ENV=$PWD/.venv PYO3_PYTHON=$PWD/.venv/bin/python
  local wheels=$target_dir/torch-wheel
  rm -rf "$wheels"
  log=$logs/torch-build.log
  check .venv/bin/maturin build --quiet --profile dev --features stubs --manifest-path $package/Cargo.toml --out "$wheels"
  log=$logs/torch-install.log
  check .venv-torch/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheels"/*.whl
  log=$logs/torch.log
  run_pytest .venv-torch/bin/python -m pytest --color=no -c $package/pyproject.toml $package/tests/test_torch.py
}

# Makes .venv-torch over a Python that has torch; installs Debian's where that is allowed. Otherwise says why that cannot be.
prepare_torch() {
  local python=.venv-torch/bin/python base=/usr/bin/python3 name=python3-torch
  if ! "$python" -c 'import torch' 2>/dev/null; then
    [[ -x $base ]] || { echo "there is no $base, for which $name would be"; return 1; }
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
      { echo "it needs Python 3.11, and $base is $("$base" --version)"; return 1; }
    if ! "$base" -c 'import torch' 2>/dev/null; then
      command -v apt-get >/dev/null || { echo "torch is not installed, and there is no apt-get to install $name"; return 1; }
      ((EUID == 0)) || { echo "torch is not installed (apt-get install $name), and only root can do that"; return 1; }
      timeout 600 apt-get install -y --no-install-recommends "$name" python3-venv >"$logs/torch-apt.log" 2>&1 ||
        { echo "'apt-get install $name' failed: $(tail -n 1 "$logs/torch-apt.log")"; return 1; }
    fi
    "$base" -m venv --clear --system-site-packages .venv-torch >&2 || { echo "'$base -m venv .venv-torch' failed"; return 1; }
  fi
  "$python" -m pip install --quiet --disable-pip-version-check "pytest>=9.2" "pydantic>=2.13" >&2 ||
    { echo "'pip install' of pytest and pydantic into .venv-torch failed"; return 1; }
}

# The reference is made from the docstrings of the built package, half of which are inside its native module.
step_docs() {
  local reason
  if ! reason=$(prepare_python docs); then
    skip "the documentation site" "$reason"
    return
  fi
  local -x VIRTUAL_ENV=$PWD/.venv
  log=$logs/docs-build.log
  check .venv/bin/maturin develop --quiet --features stubs --manifest-path bindings/python/Cargo.toml
  log=$logs/docs.log
  check .venv/bin/sphinx-build -W --keep-going -q -b html docs/site "$target_dir/site"
}

# Makes .venv and what the package's tests, or another of its extras, need in it; otherwise says why that cannot be.
prepare_python() {
  local python=.venv/bin/python
  lock_tools
  if [[ ! -x $python ]]; then
    command -v python3 >/dev/null || { echo "there is no python3"; return 1; }
    python3 -m venv .venv >&2 || { echo "'python3 -m venv .venv' failed"; return 1; }
  fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "it needs Python 3.11, and there is $("$python" --version) in .venv"; return 1; }
  "$python" - "${1:-test}" >"$logs/python-needs.txt" <<'EOF'
import sys, tomllib
with open("bindings/python/pyproject.toml", "rb") as file:
    project = tomllib.load(file)
print(*project["build-system"]["requires"], *project["project"]["optional-dependencies"][sys.argv[1]], sep="\n")
EOF
  "$python" -m pip install --quiet --disable-pip-version-check -r "$logs/python-needs.txt" >&2 ||
    { echo "'pip install' of what it needs into .venv failed"; return 1; }
}

# Last, since it has most to install: it boots a guest.
step_rdma() {
  local reason status=0 laws tests
  if ! reason=$(prepare_nixl); then
    skip "nixl over RDMA" "NIXL is not in .venv: $reason"
    return
  fi
  log=$logs/rdma-build.log
  # An emulated machine needs other limits, which are built in.
  TOWLINE_TEST_SLOW=1 check cargo test --no-run --test laws --test nixl
  laws=$(built laws) tests=$(built nixl)
  log=$logs/rdma.log
  VIRTUAL_ENV=$PWD/.venv TOWLINE_RDMA_WORKER=$(realpath "$target_dir/debug/towline-testkit-worker") \
    TOWLINE_RDMA_LAWS=$laws TOWLINE_RDMA_TESTS=$tests run_tests tests/rdma/run.sh || true
}

# The binary of that test, as the build has named it in its log.
built() { realpath "$(sed -nE "s|^ +Executable tests/$1\.rs \((.*)\)$|\1|p" "$log")"; }

step_forced-tcp() {
  TOWLINE_TEST_FORCE=tcp run_tests cargo test --test laws --no-fail-fast
}

# Only the suites of tcp: with the path forced, the others would say the same again.
step_forced-tls() {
  TOWLINE_TEST_FORCE=tcp+tls run_tests cargo test --test laws --no-fail-fast tcp
}

step_forced-crc() {
  TOWLINE_TEST_FORCE=tcp+crc run_tests cargo test --test laws --no-fail-fast tcp
}

# ---- the counting ----------------------------------------------------------------------------------------

# Runs a command that passes or fails as a whole.
check() {
  if logged "$@"; then
    passed=$((passed + 1))
    report passed
  else
    failed=$((failed + 1))
    report "FAILED: $*"
    # What it said last is the best guess at why.
    note_failures "$step: $*" < <(tail -n 12 "$log")
  fi
}

# Runs tests and adds up their own totals.
run_tests() {
  local status=0 ok bad ignored line
  logged "$@" || status=$?
  read -r ok bad ignored < <(awk '/^test result:/ { ok += $4; bad += $6; ignored += $8 }
    END { print ok + 0, bad + 0, ignored + 0 }' "$log")
  # On one core the harness has already begun the line with the test's name.
  while IFS= read -r line; do
    skips+=("$line")
  done < <(sed -nE 's/^(test .* \.\.\. )?SKIPPED //p' "$log" | sort -u)
  if ((ignored > 0)); then
    skips+=("$step: $ignored tests are marked ignored")
    skipped=$((skipped + ignored - 1))
  fi
  passed=$((passed + ok))
  if ((status == 75)); then
    skip "$step" "$(tail -n 1 "$log")"
  elif ((status != 0 || bad > 0)); then
    # A build that broke has no totals of its own.
    failed=$((failed + (bad > 0 ? bad : 1)))
    report "FAILED: $ok tests passed, $bad failed: $*"
    # What each failed test printed; without any, what the build said last.
    note_failures "$step: $*" < <(sed -nE '/^---- .* stdout ----$/,/^failures:$/p' "$log" | grep . | tail -n 60 |
      grep . || tail -n 12 "$log")
  elif ((ok == 0)); then
    failed=$((failed + 1))
    report "FAILED: no test ran: $*"
  else
    report "$ok tests passed"
  fi
}

# The same for pytest.
run_pytest() {
  local status=0 ok bad line
  logged "$@" || status=$?
  ok=$(sed -nE 's/^(=+ )?(.*, )?([0-9]+) passed.* in .*/\3/p' "$log" | tail -1)
  bad=$(sed -nE 's/^(=+ )?(.*, )?([0-9]+) failed.* in .*/\3/p' "$log" | tail -1)
  while IFS= read -r line; do
    skips+=("$line")
  done < <(sed -nE 's/^SKIPPED \[[0-9]+\] //p' "$log" | sort -u)
  passed=$((passed + ${ok:-0}))
  if ((status != 0)); then
    failed=$((failed + ${bad:-1}))
    report "FAILED: ${ok:-0} tests passed, ${bad:-1} failed: $*"
    note_failures "$step: $*" < <(grep -E '^(E  |FAILED |ERROR )' "$log" | tail -n 40)
  elif ((${ok:-0} == 0)); then
    failed=$((failed + 1))
    report "FAILED: no test ran: $*"
  else
    report "$ok tests passed"
  fi
}

# Notes that the step cannot run here, or fails it where it was required.
skip() {
  local name=$1 reason=$2
  if required "$step"; then
    failed=$((failed + 1))
    report "FAILED: required, but $reason"
  else
    echo "SKIPPED $name: $reason"
    skips+=("$name: $reason")
    report skipped
  fi
}

required() { [[ ",${TOWLINE_REQUIRE:-}," == *",$1,"* || ",${TOWLINE_REQUIRE:-}," == *",all,"* ]]; }

logged() {
  echo "+ $*"
  "$@" 2>&1 | tee "$log"
}

# Keeps what is read for the end of the output, where it is looked for first.
note_failures() {
  local line
  failures+=("FAILED $1")
  while IFS= read -r line; do
    failures+=("    ${line:0:400}")
  done
}

# One line for all tests that were skipped for the same reason; the logs have every name.
fold_skips() {
  awk '{
    at = index($0, ": ")
    name = at ? substr($0, 1, at - 1) : $0
    reason = at ? substr($0, at + 2) : ""
    if (!(reason in count)) order[++reasons] = reason
    if (++count[reason] <= 3) names[reason] = names[reason] (count[reason] > 1 ? ", " : "") name
  }
  END {
    for (i = 1; i <= reasons; i++) {
      reason = order[i]
      more = count[reason] > 3 ? " and " count[reason] - 3 " more" : ""
      print "SKIPPED " names[reason] more (reason == "" ? "" : ": " reason)
    }
  }'
}

report() { summary+=("$(printf '%-11s %4ds  %s' "$step" "$((SECONDS - began))" "$1")"); }

# ---- the run ---------------------------------------------------------------------------------------------

# Runs each of these lists of steps by this script, side by side, and adds up what they counted. The first is seen as it goes on, the
# others when all have ended.
side_by_side() {
  local list number=0 pids=()
  # With job control each has a process group, which an interrupt of this script ends.
  set -m
  for list in "$@"; do
    number=$((number + 1))
    ((number > 1)) || continue
    # shellcheck disable=SC2086
    TOWLINE_TEST_TOTALS=$logs/totals-$number "$0" $list >"$logs/list-$number.log" 2>&1 </dev/null &
    pids+=($!)
  done
  trap 'for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null; done' EXIT
  # shellcheck disable=SC2086
  TOWLINE_TEST_TOTALS=$logs/totals-1 "$0" $1 || true
  wait "${pids[@]}" || true
  trap - EXIT
  for ((number = 2; number <= $#; number++)); do
    cat "$logs/list-$number.log"
  done
  for ((number = 1; number <= $#; number++)); do
    add_totals "$logs/totals-$number"
  done
}

# Adds what a run of some steps has written about itself.
add_totals() {
  local so_far=("$passed" "$failed" "$skipped") lines=("${summary[@]}") reasons=("${skips[@]}") details=("${failures[@]}")
  if [[ ! -e $1 ]]; then
    failed=$((failed + 1))
    failures+=("FAILED: some of the steps did not come to their end: $1 was not written")
    return
  fi
  # shellcheck disable=SC1090
  source "$1"
  rm "$1"
  passed=$((passed + so_far[0])) failed=$((failed + so_far[1])) skipped=$((skipped + so_far[2]))
  summary=("${lines[@]}" "${summary[@]}") skips=("${reasons[@]}" "${skips[@]}") failures=("${details[@]}" "${failures[@]}")
}

steps=("$@")
case ${steps[*]} in
check) steps=("${check_steps[@]}") ;;
deep) steps=("${deep_steps[@]}") ;;
esac
for step in "${steps[@]}"; do
  if ! declare -F "step_$step" >/dev/null; then
    echo "there is no step '$step'; there are: ${first_steps[*]} ${second_steps[*]} fast ${deep_steps[*]:1}" >&2
    exit 2
  fi
done

if ((${#steps[@]} == 0)); then
  rm -f "$logs"/totals-*
  side_by_side "${first_steps[*]}" "${second_steps[*]}"
fi
for step in "${steps[@]}"; do
  echo
  echo "== $step"
  began=$SECONDS
  log=$logs/$step.log
  "step_$step"
done

if [[ -n ${TOWLINE_TEST_TOTALS:-} ]]; then
  declare -p passed failed skipped skips summary failures | sed 's/^declare -[-a]* //' >"$TOWLINE_TEST_TOTALS"
  exit 0
fi
echo
echo "== summary (logs in $logs)"
((${#skips[@]} == 0)) || printf '%s\n' "${skips[@]}" | fold_skips
printf '%s\n' "${summary[@]}"
((${#failures[@]} == 0)) || printf '%s\n' "${failures[@]}"
echo "$passed passed, $failed failed, $((skipped + ${#skips[@]})) skipped"
((failed == 0))
