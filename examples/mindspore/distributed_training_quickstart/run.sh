#!/bin/bash
# The same as run_with_mpi.sh without MPI, and not in the background:
#
#     bash run.sh
#
# device/train.log is the output of all ranks, device/log/rank-<rank>.log that of one, device/<rank>/ has the checkpoints
# of a rank, saved_graph/rank_<rank>/ the printed programs. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
rm -rf device saved_graph
mkdir device
cp net.py device
cd device
echo "start training: device/train.log is the log"
"${PYTHON:-python}" -m shardwise.cli run --preload shardwise.mindspore -n 8 --all --log-dir log net.py > train.log 2>&1
