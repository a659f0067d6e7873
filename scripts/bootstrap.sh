#!/usr/bin/env bash
# Make .venv with the pinned dependencies: `scripts/bootstrap.sh run`, or `dev` for the test tools too; `uv` only
# prints the path of uv.
#
# Done once: .venv/.moetune-ready holds a digest of what decides the environment, and a second call with the same
# digest returns at once. A call that was killed leaves .venv/.moetune-installing, and the next one starts afresh.
# Exit codes: 0 done, 2 PYTHON is wrong, 4 something is missing (said with what to install), else the installer's.
set -euo pipefail
shopt -s inherit_errexit
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

MODE=${1:-}
VENV=.venv
READY=$VENV/.moetune-ready
INSTALLING=$VENV/.moetune-installing
UV_PIN=uv==0.13.9  # the version constraints.txt was made with

digest() {
    cat pyproject.toml constraints.txt scripts/bootstrap.sh | cksum
}

is_ready() {
    local have_digest="" have_mode=""
    [ -f "$READY" ] || return 1
    { read -r have_digest && read -r have_mode; } <"$READY" || return 1
    [ "$have_digest" = "$(digest)" ] || return 1
    [ "$have_mode" = dev ] || [ "$have_mode" = "$MODE" ] || return 1
    venv_runs
}

# False for a venv of another Python, or of a folder that was moved: its scripts hold absolute paths.
venv_runs() {
    "$VENV/bin/python" -I - "$VENV/bin/moetune" <<<"$VENV_CHECK" 2>/dev/null
}
VENV_CHECK='
import os, sys
script = sys.argv[1]
right = (3, 12) <= sys.version_info[:2] < (3, 14)
in_place = not os.path.exists(script) or sys.prefix in open(script, errors="replace").read(2000)
sys.exit(not (right and in_place))'

# Some python3 that can make a venv. uv runs on older Pythons than MoETune does, so any will do.
venv_maker() {
    local candidate
    for candidate in "$@"; do
        if "$candidate" -I -c 'import ensurepip, venv' 2>/dev/null </dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    echo "error: no python3 with venv and pip found, so uv cannot be installed" >&2
    echo "  next: install one (Debian, Ubuntu: apt-get install python3-venv), or put uv on PATH" >&2
    return 4
}

# Print the path of a working uv: the one on PATH, else ours in .bootstrap.
find_uv() {
    local uv maker
    local -a makers
    uv=$(type -P uv || true)
    if [ -n "$uv" ] && "$uv" --version >/dev/null 2>&1; then
        printf '%s\n' "$uv"
        return 0
    fi
    uv=$PWD/.bootstrap/bin/uv
    if ! "$uv" --version >/dev/null 2>&1; then
        mapfile -t makers < <(scripts/find_python.sh 2>/dev/null || true; type -aP python3 || true)
        maker=$(venv_maker "${makers[@]}")
        echo "installing $UV_PIN into .bootstrap" >&2
        rm -rf .bootstrap
        "$maker" -m venv .bootstrap >&2
        .bootstrap/bin/python -m pip install --quiet --disable-pip-version-check "$UV_PIN" >&2
    fi
    printf '%s\n' "$uv"
}

install() {
    local uv python extra=""
    if [ "$MODE" = dev ]; then extra="[dev]"; fi
    # An index that was set for pip holds for uv too; none is written in any file of this project.
    if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"; fi
    # Trust what the system trusts, as pip does: a company's own certificate is there and not in uv's bundle.
    if [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/certs/ca-bundle.crt ]; then
        export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
    fi
    uv=$(find_uv)
    if [ -e "$INSTALLING" ] || ! venv_runs; then
        python=$(scripts/find_python.sh --download "$uv")
        rm -rf "$VENV/bin"  # first, so that a kill in the middle of the next line still leaves a venv that does not run
        rm -rf "$VENV"
        mkdir "$VENV"
        touch "$INSTALLING"
        "$uv" venv --quiet --allow-existing --python "$python" "$VENV"
    fi
    touch "$INSTALLING"
    rm -f "$READY"
    echo "installing the pinned dependencies into $VENV (5 GB the first time; torch brings the CUDA libraries)" >&2
    "$uv" pip install --python "$VENV/bin/python" --constraint constraints.txt --editable ".$extra"
    printf '%s\n%s\n' "$(digest)" "$MODE" >"$READY"
    rm -f "$INSTALLING"
}

case $MODE in
    run | dev) is_ready || install ;;
    uv) find_uv ;;
    *) echo "usage: scripts/bootstrap.sh run|dev|uv" >&2; exit 2 ;;
esac
