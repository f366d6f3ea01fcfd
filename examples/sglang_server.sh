#!/usr/bin/env bash
# A SGLang server that follows a run, and the peer beside it:
#   HUB=trainer:7077 TOKEN_FILE=token MODEL=DIR examples/sglang_server.sh [options of SGLang]
# Both processes end when either ends. Optional: PORT, STATE, and PYTHON, an interpreter with p2pcast and SGLang.
set -euo pipefail
python=${PYTHON:-python3} port=${PORT:-30000} state=$(realpath -m "${STATE:-p2pcast-peer}")
mkdir -p "$state"
export P2PCAST_SOCK=$state/install.sock  # the socket on which the peer listens to SGLang's ranks

"$python" -m sglang.launch_server --model-path "$MODEL" --host 127.0.0.1 --port "$port" "$@" &
server=$!
"$python" -m p2pcast.cli join "$HUB" --token-file "$TOKEN_FILE" --base "$MODEL" --state "$state" \
    --install "sglang:http://127.0.0.1:$port" &
peer=$!
trap 'kill "$server" "$peer" 2>/dev/null; wait' EXIT
trap exit INT TERM
wait -n
