#!/usr/bin/env bash
# Run a benchmark on two hosts with a slow link between them, all on this machine.
#
# Makes two network namespaces, joins them by a virtual cable, limits each end, runs the ranks in them, and removes
# everything again however it ends. Needs root, and iproute2's ip and tc.

set -euo pipefail

usage() {
    cat <<'EOF'
usage: benchmarks/network.sh [--ranks-per-host N] [--rate RATE] [--] SCRIPT [ARGUMENTS...]

Run a benchmark on two hosts, made of network namespaces, with a limited link between them.

  --ranks-per-host N  ranks in each of the two hosts; default: 1
  --rate RATE         of the link, each way, in the words of tc; "none" for no limit; default: 1gbit
  SCRIPT              a file, or the name of one in benchmarks/; its "--ranks" is given by the hosts

PYTHON names the interpreter; default: python.

example:
  sudo PYTHON=$PWD/.venv/bin/python benchmarks/network.sh --ranks-per-host 2 network_step.py --json network-2x2.json
EOF
}

refuse() {
    echo "network.sh: $1" >&2
    exit 2
}

ranks_per_host=1
rate=1gbit
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --ranks-per-host | --rate)
            [ $# -ge 2 ] || refuse "$1 needs a value; --help shows an example"
            case $1 in
                --rate) rate=$2 ;;
                *) ranks_per_host=$2 ;;
            esac
            shift 2
            ;;
        --)
            shift
            break
            ;;
        -*) refuse "unknown option $1; --help lists them" ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || refuse "which benchmark? --help shows an example"
[[ $ranks_per_host =~ ^[1-9][0-9]*$ ]] || refuse "--ranks-per-host is a positive number, not '$ranks_per_host'"
script=$1
shift
[ -f "$script" ] || script=$(dirname "$0")/$script
[ -f "$script" ] || refuse "no such benchmark: $script"
python=${PYTHON:-python}
command -v "$python" >/dev/null || refuse "no interpreter '$python'; set PYTHON"
for tool in ip tc; do
    command -v $tool >/dev/null || refuse "needs '$tool' of iproute2, which is not installed"
done
[ "$(id -u)" = 0 ] || refuse "makes network namespaces, which needs root: run it with sudo, or in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN"

prefix=rankstep-bench
hosts=("$prefix-$$-0" "$prefix-$$-1")

# Ends what runs in a namespace, and removes it.
remove() {
    local pids
    pids=$(ip netns pids "$1" 2>/dev/null) || return 0
    if [ -n "$pids" ]; then
        # shellcheck disable=SC2086
        kill $pids 2>/dev/null || true
        for _ in $(seq 30); do
            [ -n "$(ip netns pids "$1" 2>/dev/null)" ] || break
            sleep 0.1
        done
        pids=$(ip netns pids "$1" 2>/dev/null)
        # shellcheck disable=SC2086
        [ -z "$pids" ] || kill -KILL $pids 2>/dev/null || true
    fi
    ip netns del "$1" 2>/dev/null || true
}

remove_all() {
    trap '' INT TERM HUP
    for host in "${hosts[@]}"; do
        remove "$host"
    done
    # A cable whose ends were never moved into the namespaces.
    ip link del "rsb$$-0" 2>/dev/null || true
}

# What a run left behind that was killed outright.
for old in $(ip netns list | awk -v prefix="$prefix-" 'index($1, prefix) == 1 { print $1 }'); do
    owner=${old#"$prefix-"}
    owner=${owner%-*}
    kill -0 "$owner" 2>/dev/null || remove "$old"
done

trap remove_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

for host in "${hosts[@]}"; do
    ip netns add "$host" || refuse "this machine or container allows no network namespaces"
done
ip link add "rsb$$-0" type veth peer name "rsb$$-1" || refuse "this machine or container allows no virtual cables"
for node in 0 1; do
    host=${hosts[node]}
    ip link set "rsb$$-$node" netns "$host"
    ip -n "$host" link set "rsb$$-$node" name cable
    ip -n "$host" addr add "10.77.0.$((node + 1))/24" dev cable
    ip -n "$host" link set cable up
    ip -n "$host" link set lo up
    if [ "$rate" != none ]; then
        tc -n "$host" qdisc add dev cable root tbf rate "$rate" burst 128k latency 50ms ||
            refuse "tc could not limit the link to '$rate'"
    fi
done

world_size=$((2 * ranks_per_host))
link="2 hosts x $ranks_per_host, $rate"
launcher="benchmarks/network.sh --ranks-per-host $ranks_per_host --rate $rate"
for ((rank = 0; rank < world_size; rank++)); do
    node=$((rank / ranks_per_host))
    # RANKSTEP_HOST: by everything else that a rank can see, both hosts are this machine.
    ip netns exec "${hosts[node]}" env \
        RANK=$rank WORLD_SIZE=$world_size \
        LOCAL_RANK=$((rank % ranks_per_host)) LOCAL_WORLD_SIZE="$ranks_per_host" GROUP_RANK=$node \
        MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=cable \
        RANKSTEP_HOST="host-$node" RANKSTEP_BENCH_LINK="$link" RANKSTEP_BENCH_LAUNCHER="$launcher" \
        "$python" "$script" "$@" &
done
for ((rank = 0; rank < world_size; rank++)); do
    wait -n || exit $?
done
