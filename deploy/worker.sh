#!/bin/sh
# Entry point of a worker's image: `worker KIND PORT COMMAND...`. Names a replica after its container
# where the environment does not say otherwise, so that `--scale` needs no list of names.
set -eu
kind=$1 port=$2
shift 2
prefix=ROLLPACKER_$(echo "$kind" | tr a-z A-Z)
given() { printenv "${prefix}_$1" >/dev/null; }
given ADDRESS || export "${prefix}_ADDRESS=0.0.0.0:$port"
given WORKER_ID || export "${prefix}_WORKER_ID=$kind-$(hostname)"
given ADVERTISE_ADDRESS || export "${prefix}_ADVERTISE_ADDRESS=$(hostname):$port"
exec "$@"
