#!/usr/bin/env bash
# Is the memory right and fast on this machine's GPU? Every kernel against the reference at real sizes, the benchmarks of the
# layer and of whole models, and one table last: under 4 minutes. With --training also the 12-layer models in fp16 and compiled,
# and tests/test_gpu.py: some minutes more.
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
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl || exit 2
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
failed=0
timeout "${CASES_SECONDS:-110}" "$python" -m pytest tests/memory/triton_cases.py -q "${many[@]}" -p no:cacheprovider -W ignore --tb=short \
    --junitxml="$folder/cases.xml" >"$folder/cases.log" 2>&1 || failed=1
tail -n 15 "$folder/cases.log"
timeout 70 "$python" benchmarks/memory_layer.py --device cuda --json "$folder/memory.json" | tee "$folder/memory.md" || failed=1
timeout 50 "$python" benchmarks/model.py --json "$folder/model.json" | tee "$folder/model.md" || failed=1
if [ $training = yes ]; then
    # The paper's 12-layer models the other ways, and training itself: every precision, compiled or not, resumed to the bit.
    twelve=("12 layers, dense" "12 layers, one memory of 512^2")
    for how in "--precision fp16" "--compile" "--precision fp16 --compile"; do
        # shellcheck disable=SC2086
        timeout 120 "$python" benchmarks/model.py $how --models "${twelve[@]}" --json "$folder/model${how// /}.json" | tee "$folder/model${how// /}.md" || failed=1
    done
    timeout "${TRAINING_SECONDS:-120}" "$python" -m pytest tests/test_gpu.py -q "${many[@]}" -p no:cacheprovider -W ignore --tb=short \
        >"$folder/training.log" 2>&1 || failed=1
    tail -n 15 "$folder/training.log"
fi
"$python" benchmarks/targets.py "$folder" || failed=1
exit $failed
