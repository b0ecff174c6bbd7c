#!/usr/bin/env bash
# Test on several GPUs of one node, or of NNODES nodes (run it on each with its NODE_RANK).
#
#   tools/dist_test.sh CONFIG CHECKPOINT GPUS_PER_NODE [arguments of tools/test.py]
set -euo pipefail

if (( $# < 3 )); then
    echo "usage: [NNODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 PORT=29500] $0 CONFIG CHECKPOINT GPUS [ARGS ...]" >&2
    exit 2
fi
config=$1 checkpoint=$2 gpus=$3
shift 3

tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Without an installation too: mmzero lies beside tools/.
export PYTHONPATH="$tools/..${PYTHONPATH:+:$PYTHONPATH}"

exec python3 -m torch.distributed.run \
    --nnodes "${NNODES:-1}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" \
    --master-port "${PORT:-29500}" \
    --nproc-per-node "$gpus" \
    "$tools/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
