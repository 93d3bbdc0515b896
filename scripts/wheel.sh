#!/usr/bin/env bash
# Builds the wheel for Linux with glibc 2.28 or newer, checks it, and runs the quick start with it in a fresh environment.
# The wheel is left in bindings/python/dist. One wheel serves all versions of Python from 3.11 on.
set -euo pipefail
cd "$(dirname "$0")/.."

policy=manylinux_2_28
# A leak of debug information or of a second copy of something shows here.
most_bytes=$((4 << 20))
dist=bindings/python/dist
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

[[ -x .venv/bin/python ]] || python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check 'maturin>=1.16,<2' 'ziglang>=0.15' 'auditwheel>=6.8'

# zig links against the symbols of the old glibc, whatever this machine has.
rm -rf "$dist"
PATH=$PWD/.venv/bin:$PATH VIRTUAL_ENV=$PWD/.venv PYO3_PYTHON=$PWD/.venv/bin/python \
  .venv/bin/maturin build --release --zig --compatibility "$policy" --manifest-path bindings/python/Cargo.toml --out "$dist"

wheels=("$dist"/*.whl)
wheel=${wheels[0]}
bytes=$(stat -c %s "$wheel")
echo "$wheel: $bytes bytes"
[[ ${#wheels[@]} == 1 && $wheel == *-cp311-abi3-"$policy"_* ]] || { echo "the wheel is not one for $policy and abi3" >&2; exit 1; }
((bytes <= most_bytes)) || { echo "the wheel has more than $most_bytes bytes" >&2; exit 1; }
.venv/bin/auditwheel show "$wheel" | tee "$fresh/audit.txt"
# What it finds is what the symbols need; the name of the wheel is only what was asked for.
found=$(tr '\n' ' ' <"$fresh/audit.txt" | sed -nE 's/.*platform tag: "manylinux_2_([0-9]+)_.*/\1/p')
((found > 0 && found <= ${policy##*_})) || { echo "auditwheel finds that it is not for $policy" >&2; exit 1; }

python3 -m venv "$fresh/venv"
"$fresh/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index "$wheel"
"$fresh/venv/bin/python" examples/python/quickstart.py
