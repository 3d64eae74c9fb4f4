#!/bin/sh
# What mpiexec takes for ssh: [-OPTION]... HOST WORD... runs the words inside a host of this machine.
# TEST_HOSTS lists them as NAME=PID, where PID holds the host's namespaces; see network.py.
set -eu
while [ "${1#-}" != "$1" ]; do shift; done
name=$1
shift
for host in $TEST_HOSTS; do
    [ "${host%%=*}" = "$name" ] || continue
    ns=/proc/${host#*=}/ns
    # Like ssh, the other side's shell reads the words.
    exec nsenter --net="$ns/net" --uts="$ns/uts" --ipc="$ns/ipc" --mount="$ns/mnt" \
        --pid="$ns/pid_for_children" sh -c "$*"
done
echo "enter.sh: no host $name among $TEST_HOSTS" >&2
exit 255
