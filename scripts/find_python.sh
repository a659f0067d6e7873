#!/usr/bin/env bash
# Print the path of a Python 3.12 or 3.13 that really runs.
#
# Order: $PYTHON (wrong: exit 2), then python3.12, python3.13, python3 on PATH, then the versions under the pyenv
# root, then uv's own download (only with --download UV). Nothing found: exit 4 and say what to install.
# A pyenv shim is on PATH for every version any pyenv knows and exits 127 when that version is not the active
# one, so nothing is believed before it has run. What was tried and why it was refused goes to stderr.
set -euo pipefail

# Megatron-Core has wheels for CPython with the GIL; pyenv builds a Python without sqlite3 where its headers lack.
PROBE='
import sys, sysconfig
if not (3, 12) <= sys.version_info[:2] < (3, 14):
    sys.exit("is %d.%d, not 3.12 or 3.13" % sys.version_info[:2])
if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("is not CPython with the GIL")
try:
    import ctypes, lzma, sqlite3, ssl
except ImportError as error:
    sys.exit("was built without a needed part: %s" % error)
print(sys.executable)
'

# Print the interpreter's own path, or explain on stderr and fail. -I: PYTHONPATH and cwd must not matter.
probe() {
    local said status=0
    said=$("$1" -I -c "$PROBE" 2>&1 </dev/null) || status=$?
    if [ "$status" -eq 0 ]; then
        printf '%s\n' "${said##*$'\n'}"
        return 0
    fi
    printf '  %s: exit %s: %s\n' "$1" "$status" "${said##*$'\n'}" >&2
    return 1
}

# Every python3.12, python3.13, python3 on PATH, not only the first of each: a shim may hide a real one.
on_path() {
    local name
    for name in python3.12 python3.13 python3; do
        type -aP "$name" || true
    done
}

# Newest 3.12.x first, then newest 3.13.x.
under_pyenv() {
    local root minor version
    root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || printf '%s/.pyenv' "${HOME:-/nonexistent}")}
    for minor in 3.12 3.13; do
        find "$root/versions" -mindepth 1 -maxdepth 1 -name "$minor.*" 2>/dev/null | sort -rV | while read -r version; do
            printf '%s/bin/python\n' "$version"
        done
    done
}

downloaded_by_uv() {
    local uv=$1
    "$uv" python install 3.12 >&2 && "$uv" python find --managed-python 3.12
}

main() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        probe "$PYTHON" && return 0
        echo "error: PYTHON=$PYTHON cannot be used (reason above)" >&2
        echo "  next: point PYTHON at a working Python 3.12 or 3.13, or unset it to let MoETune look for one" >&2
        return 2
    fi
    while read -r candidate; do
        probe "$candidate" && return 0
    done < <(on_path; under_pyenv)
    if [ "${1:-}" = --download ] && candidate=$(downloaded_by_uv "$2"); then
        probe "$candidate" && return 0
    fi
    echo "error: no Python 3.12 or 3.13 found (tried: above)" >&2
    echo "  next: install one (Debian, Ubuntu: apt-get install python3.12 python3.12-venv; pyenv: pyenv install 3.12)" >&2
    echo "        or set PYTHON=/path/to/python3.12" >&2
    return 4
}

main "$@"
