#!/usr/bin/env bash
# Installs the Python package into .venv and runs its quick start; where that cannot be, says why and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
  echo "SKIPPED the Python quick start: $1"
  exit 0
}

python=.venv/bin/python
if [[ ! -x $python ]]; then
  command -v python3 >/dev/null || skip "there is no python3"
  python3 -m venv .venv || skip "'python3 -m venv .venv' failed"
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  skip "it needs Python 3.11, and there is $("$python" --version) in .venv"
echo
echo "The same in Python:"
"$python" -m pip install --quiet --disable-pip-version-check ./bindings/python || skip "'pip install ./bindings/python' failed"
echo "+ python examples/python/quickstart.py"
"$python" examples/python/quickstart.py
