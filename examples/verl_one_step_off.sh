#!/usr/bin/env bash
# verl's one-step-off trainer; p2pcast carries the weights from its actors to its rollout machines:
#   HUB=trainer:7077 TOKEN_FILE=token PEER=~/p2pcast-peer MODEL=DIR TRAIN=FILE.parquet \
#       examples/verl_one_step_off.sh [settings of verl]
# Each rollout machine runs `p2pcast join` with the state folder PEER beforehand; docs/guides/verl.md shows the command.
# Optional: PYTHON, an interpreter with p2pcast and verl.
set -euo pipefail
rollout=actor_rollout_ref.rollout
ours=$rollout.checkpoint_engine.engine_kwargs.p2pcast

exec "${PYTHON:-python3}" -m verl.experimental.one_step_off_policy.main_ppo \
    "hydra.searchpath=[pkg://verl.trainer.config]" \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.hybrid_engine=false \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_files="$TRAIN" data.val_files="$TRAIN" \
    $rollout.name=vllm \
    $rollout.checkpoint_engine.backend=p2pcast \
    +$rollout.checkpoint_engine.custom_backend_module=trainer_node.frameworks.verl \
    +$rollout.checkpoint_manager_class=trainer_node.frameworks.verl.StagingCheckpointEngineManager \
    +$ours.hub="\"$HUB\"" \
    +$ours.token_file="$TOKEN_FILE" \
    +$ours.peer="$PEER" \
    +$ours.base="$MODEL" \
    "$@"
