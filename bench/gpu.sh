#!/usr/bin/env bash
# What waits for a GPU, in a quarter of an hour at most: `bench/gpu.sh FOLDER [NANOGPT]`, from the repository, with a
# Python that has torch and this checkout (PYTHON, default .venv/bin/python). A part gets two minutes (LIMIT_S); what it
# has printed by then is in FOLDER, whatever becomes of the next. NANOGPT: a clone of karpathy/nanoGPT.
set -uo pipefail
[[ -n ${1:-} ]] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
folder=$1 nanogpt=${2:-} python=${PYTHON:-.venv/bin/python}
mkdir -p "$folder"
export PYTHONPATH=. PYTHONUNBUFFERED=1

part() { # NAME COMMAND...: its output in FOLDER/NAME.txt, its exit code as the last line (124: cut off)
  timeout -k 5 "${LIMIT_S:-120}" "${@:2}" >"$folder/$1.txt" 2>&1
  local code=$?
  echo "exit code $code" >>"$folder/$1.txt"
  echo "$1: exit code $code"
}

nvidia-smi >"$folder/nvidia-smi.txt" 2>&1
part growth-16 "$python" bench/train_step.py --sequences 16
part graphs-equal "$python" -m pytest -q tests/job/experiments/engine/test_cuda_graph.py
part dense "$python" bench/dense_step.py --device cuda ${nanogpt:+--nanogpt "$nanogpt"}
part serving "$python" bench/serving.py --characters 100 --clients 1 4
part judge "$python" bench/judge_timing.py
part lora "$python" bench/sft_step.py
part growth-128 "$python" bench/train_step.py --sequences 128
