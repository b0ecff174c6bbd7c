#!/usr/bin/env bash
# Train under Slurm, one task per GPU.
#
#   tools/slurm_train.sh PARTITION JOB_NAME CONFIG [WORK_DIR [arguments of tools/train.py]]
#
# GPUS is the total, 8 by default. SRUN_ARGS holds further options of srun, separated by blanks.
#
# A run with PreemptionHook that saves and leaves on a signal (SRUN_ARGS=--signal=USR1@120) is started again, with
# --resume; within a batch job the job is requeued, and goes on likewise.
set -euo pipefail

if (( $# < 3 )); then
    echo "usage: [GPUS=8 GPUS_PER_NODE=8 CPUS_PER_TASK=5 SRUN_ARGS=...] $0 PARTITION JOB_NAME CONFIG [WORK_DIR [ARGS ...]]" >&2
    exit 2
fi
partition=$1 job=$2 config=$3
shift 3

gpus=${GPUS:-8}
per_node=${GPUS_PER_NODE:-$(( gpus < 8 ? gpus : 8 ))}
read -ra more <<< "${SRUN_ARGS:-}"

# The fourth argument is the work dir, unless it is an option of train.py already.
arguments=(--launcher slurm)
if (( $# > 0 )) && [[ $1 != -* ]]; then
    arguments+=(--work-dir "$1")
    shift
fi

tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Without an installation too: mmzero lies beside tools/.
export PYTHONPATH="$tools/..${PYTHONPATH:+:$PYTHONPATH}"

# A batch job that was requeued.
if (( ${SLURM_RESTART_COUNT:-0} > 0 )); then
    arguments+=(--resume)
fi

start() {
    srun \
        --partition "$partition" \
        --job-name "$job" \
        --ntasks "$gpus" \
        --ntasks-per-node "$per_node" \
        --gres "gpu:$per_node" \
        --cpus-per-task "${CPUS_PER_TASK:-5}" \
        --kill-on-bad-exit=1 \
        ${more[@]+"${more[@]}"} \
        python3 -u "$tools/train.py" "$config" "${arguments[@]}" "$@"
}

# mmzero.errors.PREEMPTED
readonly preempted=85
code=0
start "$@" || code=$?
while (( code == preempted )); do
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    code=0
    start "$@" --resume || code=$?
done
exit "$code"
