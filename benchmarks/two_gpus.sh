#!/usr/bin/env bash
# Expert parallelism between two GPUs of one host: runs both grids of two_gpus.py and says what each knob does.
#   benchmarks/two_gpus.sh [FOLDER]   rows go to FOLDER (default: benchmarks/tables) and append: run it again to go on
#   benchmarks/two_gpus.sh --small    a toy model on two CPU ranks under gloo
# SECONDS_A_SHAPE (default 900) ends a shape early; PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}

if [ "${1:-}" = --small ]; then
    exec "$python" -m benchmarks.two_gpus --small
fi
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
if [ "$gpus" -lt 2 ]; then
    echo "error: needs two GPUs on this host, found $gpus; --small needs none" >&2
    exit 4
fi
folder=${1:-benchmarks/tables}
mkdir -p "$folder"
export NCCL_NVLS_ENABLE=0 # no NVLink multicast: where it is not set up, NCCL hangs at its first collective
for shape in qwen3 moonlight; do
    "$python" -m benchmarks.two_gpus "$folder/two_gpus_$shape.jsonl" --shape "$shape" \
        --seconds "${SECONDS_A_SHAPE:-900}"
done
for shape in qwen3 moonlight; do
    "$python" -m benchmarks.two_gpus "$folder/two_gpus_$shape.jsonl" --shape "$shape" --summary
done
