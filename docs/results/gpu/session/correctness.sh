#!/bin/bash
# First session on an H100: what is right, all at once; then the step of a 1B model, alone. Needs wheels in .whl.
set -u
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error DS_ACCELERATOR=cuda PYTHONUNBUFFERED=1
began=$SECONDS
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade .whl/*.whl || exit 1
site=$(python3 -c 'import site; print(site.getsitepackages()[0])')
cp docs/results/gpu/session/torch_2_11.py "$site/"
echo "import torch_2_11" > "$site/torch_2_11.pth"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
python3 -c "import torch, deepspeed, datasets, gigatoken, peft, liger_kernel, pipeline.train, benchmarks.gpu.runs, transformers, triton; print(torch.__version__, deepspeed.__version__, transformers.__version__, triton.__version__)" || exit 1
echo "installed after $((SECONDS - began)) s"
run() { # the parts of one process of the check, and its seconds
    name=$1; limit=$2; shift 2
    python3 -m benchmarks.gpu --only "$@" --part-seconds "$limit" --output "/tmp/gpu-$name" > "$OUT/$name.log" 2>&1
    cp "/tmp/gpu-$name/results.json" "$OUT/$name.json"
}
run parity 170 parity &
run attention 170 attention &
run memory 170 memory &
run deepspeed 170 deepspeed &
run demo 170 demo &
wait
echo "correctness ended after $((SECONDS - began)) s"
run step 80 step-1b-8192
echo "ended after $((SECONDS - began)) s"
for name in parity attention memory deepspeed demo step; do
    echo "== $name: $(grep -c "  passed  " "$OUT/$name.log") passed"
    grep -vE "  passed  |^step-.*  -  " "$OUT/$name.log" | cut -c1-300 | head -25
done
cat "$OUT/step.log"
mkdir /tmp/keep && mv "$OUT"/* /tmp/keep/
for log in /tmp/gpu-*/*.log; do cp "$log" "/tmp/keep/part-$(basename "$log")"; done
tar czf "$OUT/second.tgz" -C /tmp keep
