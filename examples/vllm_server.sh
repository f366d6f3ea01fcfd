#!/usr/bin/env bash
# A vLLM server that follows a run, and the peer beside it:
#   HUB=trainer:7077 TOKEN_FILE=token MODEL=DIR examples/vllm_server.sh [options of vLLM]
# Both processes end when either ends. Optional: PORT, STATE, and PYTHON, an interpreter with p2pcast and vLLM.
set -euo pipefail
python=${PYTHON:-python3} port=${PORT:-8000} state=$(realpath -m "${STATE:-p2pcast-peer}")
mkdir -p "$state"
export P2PCAST_SOCK=$state/install.sock  # the socket on which the peer listens to vLLM's ranks
export VLLM_SERVER_DEV_MODE=1            # opens the routes that change weights; they ignore --api-key, so the server is on loopback

"$python" -m vllm.entrypoints.openai.api_server --model "$MODEL" --host 127.0.0.1 --port "$port" \
    --weight-transfer-config '{"backend": "p2pcast"}' "$@" &
server=$!
"$python" -m p2pcast.cli join "$HUB" --token-file "$TOKEN_FILE" --base "$MODEL" --state "$state" \
    --install "vllm:http://127.0.0.1:$port" &
peer=$!
trap 'kill "$server" "$peer" 2>/dev/null; wait' EXIT
trap exit INT TERM
wait -n
