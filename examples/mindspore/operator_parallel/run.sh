#!/bin/bash
# Trains on as many devices of this machine as the rank table has, without MPI:
#
#     bash run.sh 8
#
# The whole output of rank r is device<r>/train.log<r>. Ends when all ranks have ended, with the first failure's code.
# PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

RANK_SIZE=${1:-8}
RANK_TABLE_FILE=rank_table_${RANK_SIZE}pcs.json
if [ ! -f "$RANK_TABLE_FILE" ]; then
    echo "usage: bash run.sh 8   (there is no $RANK_TABLE_FILE for ${RANK_SIZE} devices)" >&2
    exit 2
fi

rm -rf log device[0-9]*
for ((i = 0; i < RANK_SIZE; i++)); do
    mkdir "device$i"
    ln -s "../log/rank-$i.log" "device$i/train.log$i"
done

echo "training on $RANK_SIZE devices: device0/train.log0 is the log of rank 0"
"${PYTHON:-python}" -m shardwise.cli run --preload shardwise.mindspore --rank-table "$RANK_TABLE_FILE" --log-dir log train.py
