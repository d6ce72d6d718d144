#!/bin/bash
# The last minutes of the session: where a step's time goes, compiled steps, and a run of the trainer at 1B.
set -u
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error DS_ACCELERATOR=cuda PYTHONUNBUFFERED=1 PYTHONPATH=$PWD
began=$SECONDS
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade .whl/*.whl || exit 1
site=$(python3 -c 'import site; print(site.getsitepackages()[0])')
cp docs/results/gpu/session/torch_2_11.py "$site/"
echo "import torch_2_11" > "$site/torch_2_11.pth"
mkdir -p /tmp/gpu-run
CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=6 python3 -c "
from pathlib import Path
from benchmarks.results import BASES, STORIES
from pipeline.studies.random_base import make_random_base
from pipeline.studies.study import RandomBase
make_random_base(RandomBase(architecture=BASES / 'llama-3.2-1b.json', tokenizer=STORIES), Path('/tmp/gpu-run/base'))" > "$OUT/base.log" 2>&1 &
timeout 50 python3 docs/results/gpu/session/profile_steps.py "$OUT/profile.json"
echo "profiled after $((SECONDS - began)) s"
timeout 58 python3 -m benchmarks.gpu_step --shape 1b-8192 --rounds 1 --seconds 45 --json "$OUT/compiled.json" \
    --variant "adapt + compile" "preserve + compile" "adapt + fp8 + compile" "fft + compile" "transformers_fft + compile" "route + compile"
echo "compiled after $((SECONDS - began)) s"
python3 -m benchmarks.gpu --only parity --part-seconds 100 --output /tmp/gpu-parity > "$OUT/parity.log" 2>&1 &
python3 -m benchmarks.gpu --only run --part-seconds 100 --output /tmp/gpu-run 2>&1 | tee "$OUT/run.log" | cut -c1-400
cp /tmp/gpu-run/run/metrics.jsonl "$OUT/"
cat "$OUT/parity.log" | grep -v "  passed" | cut -c1-300
echo "ended after $((SECONDS - began)) s"
wait
cp /tmp/gpu-run/run.log "$OUT/run-part.log"
