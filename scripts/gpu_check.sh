#!/usr/bin/env bash
# What CI cannot show: everything that needs a GPU. One call on a machine with one runs the tests, the contract suite on
# every GPU backend, the sanitizers on small workloads of every kernel, the accuracy battery, and the benchmarks with
# every peer that is present.
#   scripts/gpu_check.sh OUT        OUT: folder for logs and result files
#   PYTHON=python3  FLASHKDA=path/to/_flashkda_C.abi3.so  WORKERS=8
# A part that fails does not stop the others; the exit code is the number of parts that failed. One part runs at a time,
# so with nothing else on the machine the host times in the result files are those of idle cores.
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
    local name=$1 limit=$2 log=$out/$1.log begin=$SECONDS verdict=passed tests
    shift 2
    timeout "$limit" "$@" >"$log" 2>&1 || { verdict="FAILED ($?)"; failed=$((failed + 1)); }
    tests=$(grep -E '^[0-9]+ (passed|failed|skipped|error)' "$log" | tail -n 1)
    [[ $verdict != passed || -z $tests || $tests == *passed* ]] || verdict=skipped # all of them: nothing was shown
    printf '%-28s %-12s %4d s  %s\n' "$name" "$verdict" $((SECONDS - begin)) "$(tail -n 1 "$log" | cut -c1-120)"
}

sanitized() { # name, command...: a part for each tool
    local name=$1 tool setting
    shift
    for tool in memcheck racecheck synccheck; do
        case $tool in
            memcheck) setting=PYTORCH_NO_CUDA_MEMORY_CACHING=1 ;; # every tensor is an allocation, whose ends are known
            racecheck) setting=RAPIDKDA_RACECHECK=1 ;; # barriers that it can follow
            *) setting= ;;
        esac
        part "$tool-$name" 400 env $setting \
            compute-sanitizer --error-exitcode 9 --report-api-errors no --tool "$tool" "$@"
    done
}

rapidkda=("$python" -m rapidkda.cli)
pytest=("$python" -m pytest -q -n "$workers" -p no:cacheprovider)
single=("$python" -m pytest -q -p no:cacheprovider) # one process, for the sanitizers
contract=tests/contract/test_contract.py
small=(--regime fast --regime slow --regime unbounded)
for shape in one_token one_chunk chunk_and_tail ragged_small three_heads grouped_values; do
    small+=(--shape "$shape")
done
peers=(--peers all ${FLASHKDA:+--flashkda "$FLASHKDA"})

part cuda-tests 400 "${pytest[@]}" tests/cuda
part triton-tests 120 "${pytest[@]}" -m gpu tests/triton_backend
for backend in cuda triton; do
    part "contract-$backend" 300 "${pytest[@]}" "$contract" --backend "$backend"
done
part serving 240 "${pytest[@]}" -m gpu tests/serving
part models 240 "${pytest[@]}" -m gpu tests/engine tests/integrations/transformers
part fla 600 "${pytest[@]}" tests/integrations/fla
if "$python" -c 'import vllm' 2>/dev/null; then
    part vllm 900 "$python" scripts/vllm_record.py --out "$out/vllm.json"
fi
for backend in cuda triton; do
    part "verify-$backend" 240 "${rapidkda[@]}" verify --backend "$backend"
done
# Every cuda kernel once; small steps of triton, chains that its programs share, and sequences that it cuts.
sanitized cuda "$python" tests/cuda/sanitized.py
sanitized triton "${rapidkda[@]}" verify --backend triton "${small[@]}"
sanitized triton-shares "$python" tests/triton_backend/sanitized.py
sanitized triton-parts "${single[@]}" "$contract" --backend triton -k "long_among or checkpoints_of_a_long"
part evaluation 400 "${rapidkda[@]}" eval ${FLASHKDA:+--flashkda "$FLASHKDA"} --out "$out/evaluation.json"
part bench-prefill 400 "${rapidkda[@]}" bench prefill --regime fast --regime slow --regime unbounded "${peers[@]}" \
    --out "$out/prefill.json"
part bench-decode 200 "${rapidkda[@]}" bench decode --out "$out/decode.json"
part bench-decode-bf16 200 "${rapidkda[@]}" bench decode --state-dtype bfloat16 --out "$out/decode-bf16.json"
part bench-verify 300 "${rapidkda[@]}" bench verify --out "$out/verify.json"
part bench-verify-slots 200 "${rapidkda[@]}" bench verify --slots --out "$out/verify-slots.json"
part bench-layer 200 "${rapidkda[@]}" bench layer --regime fast --regime slow \
    ${FLASHKDA:+--reference flashkda --flashkda "$FLASHKDA"} --out "$out/layer.json"
exit "$failed"
