#!/usr/bin/env bash
# Is the memory right and fast on this machine's GPU? Every kernel against the reference at real sizes, the benchmarks of the
# layer and of whole models, and one table last: under 4 minutes. With --training also the 12-layer models in fp16 and compiled,
# and tests/gpu/test_gpu.py: some minutes more.
#
#   scripts/gpu_check.sh [--training] [FOLDER]     FOLDER gets the numbers as JSON and the logs (default: build/gpu_check)
#
# Needs torch with CUDA, triton and pytest. Wheels that lie in .whl/ (pydantic, say, where an image lacks it) are used from
# there; nothing is fetched.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
training=no
if [ "${1:-}" = --training ]; then
    training=yes
    shift
fi
folder=${1:-build/gpu_check}
python=${PYTHON:-python3}
mkdir -p "$folder"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

if ! "$python" -c 'import pydantic' 2>/dev/null; then
    wheels=(.whl/*.whl)
    if [ ! -e "${wheels[0]}" ]; then
        echo "error: $python has no pydantic" >&2
        echo "  fix: put wheels of pydantic, pydantic-core, annotated-types and typing-inspection for it into .whl/" >&2
        exit 2
    fi
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "${wheels[@]}" || exit 2
    export PYTHONPATH=$site:$PYTHONPATH
fi
"$python" - <<'CHECK' || exit 2
import sys
import torch
if not torch.cuda.is_available():
    sys.exit("error: no CUDA device here\n  fix: run this on a machine with an NVIDIA GPU")
CHECK

many=()
if "$python" -c 'import xdist' 2>/dev/null; then many=(-n 12); fi # compiling is most of the work
tests=(-q "${many[@]}" -p no:cacheprovider -W ignore --tb=short)
rm -f "$folder"/{cases,training}.log "$folder"/cases.xml "$folder"/{memory,model*}.json # numbers of an earlier run are none of this one
failed=0

# stage SECONDS COMMAND...: a stage that fails, or is not done in its time, says so, and the next one begins. It is stopped by
# an interrupt first, upon which pytest still reports what it has found.
stage() {
    local seconds=$1 code=0
    shift
    timeout --signal=INT --kill-after=10 "$seconds" "$@" || code=$?
    if [ $code != 0 ]; then
        failed=1
        [ $code = 124 ] || [ $code = 137 ] && code="$code (not done in $seconds s)"
        echo "FAILED, exit code $code: ${*:2}"
    fi
}

stage "${CASES_SECONDS:-100}" "$python" -m pytest tests/memory/triton_*_cases.py tests/model/triton_loss_cases.py "${tests[@]}" --junitxml="$folder/cases.xml" >"$folder/cases.log" 2>&1
tail -n 15 "$folder/cases.log"
stage 65 "$python" benchmarks/memory_layer.py --device cuda --json "$folder/memory.json"
stage 45 "$python" benchmarks/model.py --json "$folder/model.json"
if [ $training = yes ]; then
    # The paper's 12-layer models the other ways, and training itself: every precision, compiled or not, resumed to the bit.
    twelve=("12 layers, dense" "12 layers, one memory of 512^2")
    stage 120 "$python" benchmarks/model.py --precision fp16 --models "${twelve[@]}" --json "$folder/model-fp16.json"
    stage 120 "$python" benchmarks/model.py --compile --models "${twelve[@]}" --json "$folder/model-compiled.json"
    stage 120 "$python" benchmarks/model.py --precision fp16 --compile --models "${twelve[@]}" --json "$folder/model-fp16-compiled.json"
    stage "${TRAINING_SECONDS:-120}" "$python" -m pytest tests/gpu/test_gpu.py "${tests[@]}" >"$folder/training.log" 2>&1
    tail -n 15 "$folder/training.log"
fi
"$python" benchmarks/targets.py "$folder" || failed=1
exit $failed
