#!/usr/bin/env bash
# Make .venv-bridge (Megatron Bridge beside the packages of .venv, which it reads and does not change) and run the
# optional test group `bridge` in it: scripts/bridge_oracle.sh [PYTHON_OF_THE_BASE_ENVIRONMENT] [pytest arguments].
#
# Installs 180 MB in about 20 s. Where a package cannot be had it says so and exits 0: the group is optional. Exits with
# pytest's code otherwise.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

BASE=.venv/bin/python
if [ $# -gt 0 ] && [ -x "$1" ]; then
    BASE=$1
    shift
fi
VENV=.venv-bridge
READY=$VENV/.ready
# Bridge names 25 packages; these are the ones that its configuration imports. The tests stand in for the rest.
BRIDGE=megatron-bridge==0.6.2
NEEDED=("hydra-core>=1.3.4,<1.4" "omegaconf>=2.3" "transformers>=5.8,<=5.12.1" einops regex)

skip() {
    echo "the bridge group is skipped: $1" >&2
    exit 0
}

[ -x "$BASE" ] || skip "no $BASE; run scripts/bootstrap.sh dev first"
SITE=$("$BASE" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
STAMP="$SITE $BRIDGE ${NEEDED[*]}"
if [ "$(cat "$READY" 2>/dev/null)" != "$STAMP" ]; then
    rm -rf "$VENV"
    "$BASE" -m venv "$VENV" || skip "cannot make a virtual environment"
    echo '*' >"$VENV/.gitignore"
    echo "$SITE" >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input)
    timeout 110 "${pip[@]}" "${NEEDED[@]}" || skip "not all of ${NEEDED[*]} could be installed"
    timeout 60 "${pip[@]}" --no-deps "$BRIDGE" || skip "$BRIDGE could not be installed"
    echo "$STAMP" >"$READY"
fi
exec env OMP_NUM_THREADS=1 "$VENV/bin/python" -m pytest -m bridge -W ignore tests/search_spaces/bridge "$@"
