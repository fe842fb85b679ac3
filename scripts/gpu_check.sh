#!/usr/bin/env bash
# What CI cannot show: everything that needs a GPU. One call on a machine with one runs the tests, the contract suite on
# every GPU backend, the sanitizers on small workloads, the accuracy battery, and the benchmarks with every peer that is
# present.
#   scripts/gpu_check.sh OUT        OUT: folder for logs and result files
#   PYTHON=python3  FLASHKDA=path/to/_flashkda_C.abi3.so  WORKERS=8
# A part that fails does not stop the others; the exit code is the number of parts that failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=${1:?usage: scripts/gpu_check.sh OUT}
python=${PYTHON:-python3}
workers=${WORKERS:-8}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "no GPU that torch can use"; exit 1; }
mkdir -p "$out"
failed=0

part() { # name, seconds, command...
    local name=$1 limit=$2 begin=$SECONDS verdict=passed
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || { verdict="FAILED ($?)"; failed=$((failed + 1)); }
    printf '%-28s %-12s %4d s  %s\n' "$name" "$verdict" $((SECONDS - begin)) "$(tail -n 1 "$out/$name.log" | cut -c1-120)"
}

rapidkda=("$python" -m rapidkda.cli)
pytest=("$python" -m pytest -q -n "$workers" -p no:cacheprovider)
peers=(--peers all ${FLASHKDA:+--flashkda "$FLASHKDA"})

part cuda-tests 180 "${pytest[@]}" tests/cuda/test_cuda_prefill.py
for backend in cuda triton; do
    part "contract-$backend" 300 "${pytest[@]}" tests/contract/test_contract.py --backend "$backend"
done
part serving 240 "${pytest[@]}" tests/serving/test_backends.py tests/serving/test_graphs.py tests/serving/test_schedules.py
part models 240 "${pytest[@]}" tests/engine/test_generation.py tests/integrations/transformers
part fla 600 "${pytest[@]}" tests/integrations/fla
if "$python" -c 'import vllm' 2>/dev/null; then
    part vllm 900 "$python" scripts/vllm_record.py --out "$out/vllm.json"
fi
for backend in cuda triton; do
    part "verify-$backend" 240 "${rapidkda[@]}" verify --backend "$backend"
    for tool in memcheck racecheck synccheck; do
        racecheck=$([ "$tool" = racecheck ] && echo 1 || echo 0)
        part "$tool-$backend" 240 env RAPIDKDA_RACECHECK="$racecheck" compute-sanitizer --error-exitcode 9 \
            --report-api-errors no --tool "$tool" "${rapidkda[@]}" verify --quick --backend "$backend"
    done
done
part evaluation 400 "${rapidkda[@]}" eval ${FLASHKDA:+--flashkda "$FLASHKDA"} --out "$out/evaluation.json"
part bench-prefill 400 "${rapidkda[@]}" bench prefill --regime fast --regime slow --regime unbounded "${peers[@]}" \
    --out "$out/prefill.json"
part bench-decode 200 "${rapidkda[@]}" bench decode --out "$out/decode.json"
part bench-decode-bf16 200 "${rapidkda[@]}" bench decode --state-dtype bfloat16 --out "$out/decode-bf16.json"
part bench-verify 200 "${rapidkda[@]}" bench verify --out "$out/verify.json"
part bench-verify-slots 200 "${rapidkda[@]}" bench verify --slots --out "$out/verify-slots.json"
part bench-layer 200 "${rapidkda[@]}" bench layer --regime fast --regime slow \
    ${FLASHKDA:+--reference flashkda --flashkda "$FLASHKDA"} --out "$out/layer.json"
exit "$failed"
