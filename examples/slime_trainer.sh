#!/usr/bin/env bash
# slime, and the hub that carries its weights to the rollout machines:
#   TOKEN_FILE=token WEIGHTS=/weights examples/slime_trainer.sh python3 train.py [options of slime]
# Each rollout machine runs `p2pcast join`; docs/guides/step-folders.md shows the command. Optional: LISTEN and HTTP,
# addresses of the hub; STATE, its folder; HOSTS, the number of rollout machines; PYTHON, an interpreter with p2pcast.
# With LEDGER=http://127.0.0.1:7079, its BEARER_FILE, and SAVE, slime's folder of checkpoints, the rollouts are the
# ledger's (docs/guides/ledger-bridges.md). The hub and slime end together.
set -euo pipefail
python=${PYTHON:-python3} listen=${LISTEN:-0.0.0.0:7077} http=${HTTP:-127.0.0.1:7078}
state=$(realpath -m "${STATE:-p2pcast-hub}")
mkdir -p "$WEIGHTS"
export P2PCAST_HUB_HTTP=http://$http P2PCAST_ROLLOUT_HOSTS=${HOSTS:-1}

options=(--update-weight-transport disk --update-weight-disk-dir "$WEIGHTS"
    --custom-update-weight-post-write-path trainer_node.frameworks.slime.publish_folder)
if [ -n "${LEDGER:-}" ]; then
    export P2PCAST_LEDGER=$LEDGER P2PCAST_LEDGER_BEARER_FILE=${BEARER_FILE:-}
    # slime counts its weights from 1 at each start; the ledger counts rollouts, so slime begins at the checkpoint's.
    settings=$SAVE/p2pcast-slime.yaml
    mkdir -p "$SAVE"
    saved=$(cat "$SAVE/latest_checkpointed_iteration.txt" 2>/dev/null || echo -1)
    echo "update_weight_start_version: $((saved + 1))" >"$settings"
    options+=(--save "$SAVE" --load "$SAVE" --custom-config-path "$settings"
        --rollout-function-path trainer_node.frameworks.slime_rollouts.generate_rollout
        --custom-reward-post-process-path trainer_node.frameworks.slime_rollouts.ledger_rewards)
fi

"$python" -m p2pcast.cli seed "$WEIGHTS" --step-names 'weight_v{step:06}' --token-file "$TOKEN_FILE" \
    --state "$state" --listen "$listen" --http "$http" &
hub=$!
"$@" "${options[@]}" &
slime=$!
trap 'kill "$hub" "$slime" 2>/dev/null; wait' EXIT
trap exit INT TERM
wait -n
