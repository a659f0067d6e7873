#!/usr/bin/env bash
# Write constraints.txt from pyproject.toml: exact pins of everything transitive, without an address of any index.
#
# Keeps the pins that still fit; `--upgrade` takes the newest. Resolved for Python 3.12 and checked to be the same
# for 3.13, so one file serves both. uv writes no index address unless asked to. Needs a registry; the index comes from the environment (UV_DEFAULT_INDEX).
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

uv=$(scripts/bootstrap.sh uv)
other=$(mktemp)
trap 'rm -f "$other"' EXIT

compile() {
    "$uv" pip compile pyproject.toml --extra dev --extra gpu --quiet \
        --python-version "$1" --python-platform x86_64-manylinux_2_28 --strip-extras \
        --no-header --annotation-style line \
        --output-file "$2" "${@:3}" >/dev/null
}

compile 3.12 constraints.txt "$@"
cp constraints.txt "$other"
compile 3.13 "$other"
if ! diff <(cut -d' ' -f1 constraints.txt) <(cut -d' ' -f1 "$other") >&2; then
    echo "error: Python 3.13 needs other versions than 3.12 (above); pin one that serves both in pyproject.toml" >&2
    exit 1
fi
echo "constraints.txt: $(grep -c == constraints.txt) packages" >&2
