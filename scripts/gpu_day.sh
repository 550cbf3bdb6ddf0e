#!/usr/bin/env bash
# Fifteen minutes on a GPU, in two calls on one warm machine; tests/gpu/README.md says how to prepare them.
#
#     scripts/gpu_day.sh 1 [SECONDS]  what matters most, in at most 9 minutes
#     scripts/gpu_day.sh 2 SECONDS    the rest, in the time that is left
#
# Results go to $OUT at once, so that a part that is stopped loses nothing else. `python scripts/gpu_day/report.py` reads them.
# MODEL: another folder of scripts/configs. SITE: packages that were carried to the machine.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
call=${1:?name the call: 1 or 2}
budget=${2:-540}
cd "$root" || exit 9
: "${OUT:?name the folder of the results}"
mkdir -p "$OUT"
large=${MODEL:-llama-3.1-8b}
small=${MODEL:-llama-3.2-1b}
# with which python the packages are installed
python=${PYTHON:-python3}
site=${SITE:-$root/.site}
export PYTHONPATH=$site:$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# as litft's commands set it
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# everything that is printed is kept, also of a part that is stopped
exec > >(tee -a "$OUT/log-$call.txt") 2>&1

left() { echo $((budget - SECONDS)); }

# part NAME SECONDS COMMAND...: run a command for at most so many seconds, and say how it ended
part() {
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    if [ "$limit" -gt "$(left)" ]; then
        limit=$(left)
    fi
    if [ "$limit" -lt 20 ]; then
        echo "## $name: no time is left"
        echo "$name,skipped,0" >>"$OUT/parts-$call.csv"
        return
    fi
    echo "## $name (at most $limit s): $*"
    # pytest writes what it has when it is interrupted
    LIMIT=$((limit - 10)) timeout --signal=INT --kill-after=8 "$((limit - 8))" "$@"
    local status=$?
    echo "## $name: exit $status after $((SECONDS - began)) s, $(left) s left"
    echo "$name,$status,$((SECONDS - began))" >>"$OUT/parts-$call.csv"
}

# LIMIT is set by `part`
figures() { "$python" scripts/gpu_day/measure.py --out "$OUT" --seconds "$LIMIT" --accelerator "${ACCELERATOR:-cuda}" "$@"; }
tests() {
    local out=$1
    shift
    "$python" -m pytest -v --tb=short -p no:cacheprovider -n "${WORKERS:-8}" --dist load --junitxml "$OUT/$out.xml" "$@"
}
export -f figures tests
export python OUT

benchmark=("$python" scripts/benchmark.py --precision bf16 --steps 6 --warmup 2 --data.max_seq_length 2048)
quick="tests/gpu/test_gpu_kernels.py tests/gpu/test_gpu_methods.py tests/gpu/test_gpu_networks.py"
more_tests="tests/gpu/test_gpu_decoding.py tests/gpu/test_gpu_runs.py tests/gpu/test_gpu_distributed.py"

machine() {
    nvidia-smi
    "$python" --version
    "$python" -c 'import sys, torch; print(sys.executable, torch.__version__, torch.version.cuda, torch.cuda.get_device_name())'
    nproc
    free -g
    df -h / /tmp
}

launch='import bitsandbytes, jsonargparse, lightning_fabric, litft, peft, torch, transformers
print(torch.randn(8, device="cuda").sum().item(), bitsandbytes.__version__, transformers.__version__)'

machine >"$OUT/machine.txt" 2>&1
if [ "$call" = 1 ]; then
    part "launch" 60 "$python" -c "$launch"
    part "LoRA" 100 bash -c "figures --subject lora --model $large"
    part "decoding" 60 bash -c "figures --subject decoding --model $large"
    part "quick tests" 100 bash -c "tests tests-1 $quick -m quick"
    part "peft" 80 "${benchmark[@]}" --checkpoint_dir "scripts/configs/$large" --train.micro_batch_size 1 \
        --train.global_batch_size 2 --peer peft --out "$OUT/peft.json"
    part "QLoRA" 60 bash -c "figures --subject qlora --model $large"
else
    part "recomputation" 60 bash -c "figures --subject recomputation --model $large"
    part "more tests" 160 bash -c "tests tests-2 $more_tests -m quick"
    part "plan" 60 "$python" scripts/plan_accuracy.py --accelerator cuda --minutes 0.6 --only full --out "$OUT/cells.json"
    part "attention" 50 "$python" scripts/attention_speed.py --out "$OUT/attention.json"
    # inductor's C++ code for the host needs a CUDA toolkit; its figures are in the log only
    part "C++ on the host" 90 bash -c "TORCHINDUCTOR_CPP_WRAPPER=1 OUT=$(mktemp -d) figures --subject lora --model $large"
    part "small model" 50 bash -c "figures --subject lora --model $small"
fi
nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used --format=csv || true
echo "## end of call $call after $SECONDS s"
