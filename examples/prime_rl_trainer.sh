#!/usr/bin/env bash
# prime-rl, the hub that carries its weights to the rollout machines, and the proxy in front of their servers:
#   TOKEN_FILE=token BROADCASTS=outputs/run/broadcasts ENGINES="http://gpu-1:8000 http://gpu-2:8000" FOLDER=/weights \
#       examples/prime_rl_trainer.sh uv run rl @ rl.toml
# Each rollout machine runs `p2pcast join` with safetensors:$FOLDER; docs/guides/step-folders.md shows the command. The
# script appends `@ FILE` to the command, with the settings that prime-rl needs. Optional: LISTEN and HTTP, addresses of
# the hub; PORT, of the first proxy; STATE, the hub's folder; HOSTS, the number of rollout machines; PYTHON, an interpreter
# with p2pcast. All processes end together.
set -euo pipefail
python=${PYTHON:-python3} listen=${LISTEN:-0.0.0.0:7077} http=${HTTP:-127.0.0.1:7078} port=${PORT:-9001}
state=$(realpath -m "${STATE:-p2pcast-hub}")
settings=$(mktemp --suffix .toml)

read -ra servers <<<"$ENGINES"
engines=() urls=
for server in "${servers[@]}"; do
    engines+=(--engine "127.0.0.1:$port=$server")
    urls+="\"http://127.0.0.1:$port\", "
    port=$((port + 1))
done
cat >"$settings" <<SETTINGS
[weight_broadcast]
type = "filesystem"
[orchestrator.model.client]
admin_base_url = [${urls%, }]
SETTINGS

"$@" @ "$settings" &
trainer=$!
hub=$trainer proxy=$trainer
trap 'kill "$hub" "$proxy" "$trainer" 2>/dev/null; wait; rm -f "$settings"' EXIT
trap exit INT TERM
# prime-rl refuses a run whose folder is there before it, so prime-rl makes the folder. Remove an old one by hand.
until [ -d "$(dirname "$BROADCASTS")" ]; do
    kill -0 "$trainer"
    sleep 0.2
done
mkdir -p "$BROADCASTS"
"$python" -m p2pcast.cli seed "$BROADCASTS" --step-marker prime-rl --token-file "$TOKEN_FILE" \
    --state "$state" --listen "$listen" --http "$http" &
hub=$!
"$python" -m trainer_node.frameworks.prime_rl "$BROADCASTS" "${engines[@]}" --folder "$FOLDER" --hub "http://$http" \
    --hosts "${HOSTS:-${#servers[@]}}" &
proxy=$!
wait -n
