#!/bin/bash
# Trains on eight devices of this machine with Open MPI, in the background:
#
#     bash run_with_mpi.sh
#
# device/train.log is the output of all ranks, device/<rank>/ has the checkpoints of a rank, saved_graph/rank_<rank>/ the
# printed programs. PYTHON chooses the interpreter, MPIRUN the launcher and its options.
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
rm -rf device saved_graph
mkdir device
cp net.py device
cd device || exit 1
echo "start training: device/train.log is the log"
${MPIRUN:-mpirun} -n 8 --oversubscribe "${PYTHON:-python}" net.py > train.log 2>&1 &
cd ..
