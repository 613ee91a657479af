#!/bin/sh
# Trains a small Llama on the King James Bible, stops, resumes, generates, and plots the loss. Three minutes on two cores.
set -eu
runs=nxdt_experiments/demo
run=$runs/llama-small
rm -rf "$runs"

say() { printf '\n== %s\n' "$*"; }
train() { echo "\$ nxdt train recipe:llama-small $*"; nxdt train recipe:llama-small exp_manager.exp_dir=$runs "$@"; }

say "Train 200 steps and stop"
train trainer.max_steps=200
say "Resume, and go on to 300"
train trainer.max_steps=300
say "Its checkpoints"
nxdt checkpoint list "$run/checkpoints"
say "What it learned"
nxdt generate "$run/checkpoints" "And the LORD said unto Moses, " --max-new-tokens 80 --temperature 0.4 --top-k 5 --seed 4
say "The loss"
nxdt plot "$run"
