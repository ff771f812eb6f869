#!/usr/bin/env bash
# Runs recipes of the cookbook, unmodified, against a server of this library.
#   scripts/cookbook/run.sh HUB BASE_URL PYTHON [RECIPE ...]
# HUB is the directory of stand_ins.py with the base model in it, PYTHON has scripts/cookbook/requirements.txt installed.
# RECIPEs are sl, rl, dpo, distill; default: these, in this order. dpo begins with the weights that sl saved, and distill
# learns from the ones that rl saved. chat_sl, math_rl, gsm8k, guess_number, shorter and multi_teacher take one step each
# at the recipes' own sizes, but for what is said here.
set -euo pipefail
hub=$(cd -P "$1" && pwd) url=$2 python=$3
shift 3
model=Qwen/Qwen3-4B-Instruct-2507
cd "$hub" # names of models and data sets are paths from here
# -P: the directory openai/ here is data, and no module. TINKER_API_KEY only has to begin with tml-.
export HF_HUB_OFFLINE=1 HF_HOME="$hub/.cache" PYTHONSAFEPATH=1 TINKER_API_KEY=${TINKER_API_KEY:-tml-local}
export TINKER_BASE_URL=$url # guess_number and shorter have no option base_url

# The tinker:// path that a run saved last: `saved sl state_path`.
saved() { tail -n 1 "runs/$1/checkpoints.jsonl" | sed "s/.*\"$2\": \"\([^\"]*\)\".*/\1/"; }

sl() {
    rm -rf runs/sl
    "$python" -m tinker_cookbook.recipes.sl_loop base_url="$url" model_name="$model" log_path=runs/sl \
        batch_size=32 learning_rate=3e-3 max_length=512
}

rl() {
    rm -rf runs/rl # a loop that finds checkpoints in its log_path goes on from them
    "$python" -m tinker_cookbook.recipes.rl_loop base_url="$url" model_name="$model" log_path=runs/rl \
        batch_size=16 group_size=8 learning_rate=1e-3 max_tokens=16 max_steps=40
}

dpo() {
    "$python" -m tinker_cookbook.recipes.preference.dpo.train base_url="$url" model_name="$model" log_path=runs/dpo \
        behavior_if_log_dir_exists=delete load_checkpoint_path="$(saved sl state_path)" \
        batch_size=32 learning_rate=1e-3 max_length=512
}

distill() {
    "$python" -m tinker_cookbook.recipes.distillation.on_policy_distillation base_url="$url" model_name="$model" \
        log_path=runs/distill behavior_if_log_dir_exists=delete lora_rank=32 \
        teacher_model="$model" teacher_checkpoint="$(saved rl sampler_path)" dataset=deepmath \
        groups_per_batch=32 learning_rate=1e-3 max_tokens=16
}

# A recipe as shipped, for one step: `shipped NAME MODULE [OPTION ...]`.
shipped() {
    "$python" -m "tinker_cookbook.recipes.$2" model_name="$model" log_path="runs/$1" behavior_if_log_dir_exists=delete \
        max_steps=1 "${@:3}"
}
chat_sl() { shipped chat_sl chat_sl.train base_url="$url"; }
math_rl() { shipped math_rl math_rl.train base_url="$url"; }
gsm8k() { shipped gsm8k math_rl.train base_url="$url" env=gsm8k max_tokens=16; }
guess_number() { shipped guess_number multiplayer_rl.guess_number.train; }
shorter() { shipped shorter preference.shorter.train; }
# Both teachers are the base: the server has no other model. Its largest rank is 32.
multi_teacher() {
    shipped multi_teacher distillation.on_policy_multi_teacher base_url="$url" lora_rank=32 \
        deepmath_teacher_model="$model" tulu3_teacher_model="$model" \
        deepmath_groups_per_batch=64 tulu3_groups_per_batch=64
}

(($#)) || set -- sl rl dpo distill
for recipe; do
    begun=$SECONDS
    "$recipe"
    echo "$recipe: $((SECONDS - begun)) s"
done
