#!/bin/sh
# Entry of the images: prepares what Kubernetes mounts and tells, then becomes the command.
#
#   entry.sh python train.py    a rank, or mpirun
#   entry.sh sshd               a worker of the MPI operator: waits for mpirun's ssh
set -eu

# A Secret's files belong to root, or to a group; the job's key must be this user's alone.
secret=${SPARKHVD_JOB_KEY_SECRET:-/run/secrets/sparkhvd/key}
if [ -z "${SPARKHVD_JOB_KEY_FILE:-}" ] && [ -r "$secret" ]; then
    SPARKHVD_JOB_KEY_FILE=$(umask 077 && mktemp)
    cat "$secret" > "$SPARKHVD_JOB_KEY_FILE"
    export SPARKHVD_JOB_KEY_FILE
fi

# An indexed Job tells a pod its number; one pod is one rank.
if [ -n "${JOB_COMPLETION_INDEX:-}" ] && [ -z "${RANK:-}" ]; then
    export RANK="$JOB_COMPLETION_INDEX" LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
fi

if [ "${1:-}" = sshd ]; then
    # Keys of this host are made here, and those of the job are mounted by the operator.
    home=${SPARKHVD_SSHD_HOME:-$HOME}
    [ -f "$home/.sshd_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$home/.sshd_key"
    set -- /usr/sbin/sshd -De -o "Port=${SPARKHVD_SSHD_PORT:-2222}" -o "HostKey=$home/.sshd_key" -o UsePAM=no \
        -o "PidFile=$home/.sshd.pid" -o StrictModes=no -o PasswordAuthentication=no
fi
exec "$@"
