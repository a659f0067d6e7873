#!/usr/bin/env bash
# Expert parallelism between two GPUs of one host: runs the grids of two_gpus.py and says what each knob does.
#   benchmarks/two_gpus.sh [FOLDER]   rows go to FOLDER (default: benchmarks/tables) and append: run it again to go on
#   benchmarks/two_gpus.sh --small    a toy model on two CPU ranks under gloo
# Then a sweep over the same knobs by strategy `walls` (examples/two-h200.yaml), stopped once on purpose and resumed, and
# its report, in FOLDER/two_gpus_sweep; `--small-sweep` is its small form, some 3 minutes on two CPU ranks.
# SECONDS_A_SHAPE (default 900) ends a shape early, SECONDS_TO_STOP (default 240) is when the sweep is stopped; PYTHON
# chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
python=${PYTHON:-python}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

# sweep FILE SECONDS FOLDER: run it, send Ctrl-C after SECONDS, resume it, report.
sweep() {
    local file=$1 seconds=$2 folder=$3 code=0
    mkdir -p "$folder"
    cd "$folder"
    timeout --foreground -s INT "$seconds" "$python" -m tuner.cli run "$file" || code=$?
    case $code in
    0) echo "the sweep ended before it was stopped" ;;
    124 | 130) "$python" -m tuner.cli run "$file" --resume ;;
    *) exit "$code" ;;
    esac
    "$python" -m tuner.cli report "$file" -o report
    cd "$root"
}

if [ "${1:-}" = --small ]; then
    exec "$python" -m benchmarks.two_gpus --small
fi
if [ "${1:-}" = --small-sweep ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    sed -e 's/^  trials: .*/  trials: 6/; s/^  rounds: .*/  rounds: 1/; s/^verify:/search: {strategy: walls}\nverify:/' \
        examples/laptop.yaml >"$scratch/laptop.yaml"
    sweep "$scratch/laptop.yaml" "${SECONDS_TO_STOP:-60}" "$scratch/runs"
    exit
fi
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
if [ "$gpus" -lt 2 ]; then
    echo "error: needs two GPUs on this host, found $gpus; --small needs none" >&2
    exit 4
fi
folder=${1:-benchmarks/tables}
mkdir -p "$folder"
export NCCL_NVLS_ENABLE=0 # no NVLink multicast: where it is not set up, NCCL hangs at its first collective
shapes="qwen3 moonlight"
if "$python" -c "import torch, fused_weight_gradient_mlp_cuda" 2>/dev/null; then
    shapes="$shapes qwen3-late moonlight-late"
else
    echo "without Apex's fused_weight_gradient_mlp_cuda: delayed gradients of captured attention are left out"
fi
case $("$python" -c "from importlib.metadata import version; print(version('megatron-core'))") in
*+ncclep) shapes="$shapes qwen3-ncclep moonlight-ncclep" ;;
*) echo "with Megatron-Core as released: ncclep is left out (benchmarks/ncclep_patch.py)" ;;
esac
for shape in $shapes; do
    "$python" -m benchmarks.two_gpus "$folder/two_gpus_${shape//-/_}.jsonl" --shape "$shape" \
        --seconds "${SECONDS_A_SHAPE:-900}"
done
for shape in $shapes; do
    "$python" -m benchmarks.two_gpus "$folder/two_gpus_${shape//-/_}.jsonl" --shape "$shape" --summary
done
sweep "$root/examples/two-h200.yaml" "${SECONDS_TO_STOP:-240}" "$folder/two_gpus_sweep"
