#!/bin/sh
# Trains a small Llama on the King James Bible, stops, resumes, generates, and plots the loss. Two minutes on two cores.
set -eu
runs=nxdt_experiments/demo
run=$runs/llama-small
rm -rf "$runs"

show() { printf '\n== %s\n$ %s\n' "$1" "$2"; eval "$2"; }

show "Train 200 steps and stop" "nxdt train recipe:llama-small exp_manager.exp_dir=$runs trainer.max_steps=200"
show "Resume, and train to step 300" "nxdt train recipe:llama-small exp_manager.exp_dir=$runs trainer.max_steps=300"
show "List the checkpoints" "nxdt checkpoint list $run/checkpoints"
show "Generate text" \
    "nxdt generate $run 'And the LORD said unto Moses, ' --max-new-tokens 80 --temperature 0.4 --top-k 5 --seed 6"
show "Plot the loss" "nxdt plot $run"
printf '\nNext: ". .venv/bin/activate", then docs/quickstart.md\n'
