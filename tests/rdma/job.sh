# Inside the guest, as root: an RDMA device in software, and the tests of the path nixl over it.
set -u
ulimit -l unlimited
sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0

# The connection manager does not work on the loopback device. Large frames make large RDMA packets.
ip link set lo up
ip link add rdma-a mtu 9000 type veth peer name rdma-b mtu 9000
ip addr add 10.88.0.1/24 dev rdma-a
ip -6 addr add fd88::1/64 dev rdma-a nodad
ip link set rdma-a up
ip link set rdma-b up
rdma link add rxe0 type rxe netdev rdma-a || exit 1

# UCX connects by datagrams, which soft-RoCE drops unless they carry IPv6: the entry of that address.
device=/sys/class/infiniband/rxe0/ports/1
entry=
for _ in $(seq 50); do
  entry=$(grep -l fd88 "$device"/gids/* 2>/dev/null | head -n 1)
  [ -n "$entry" ] && break
  sleep 0.1
done
export TOWLINE_TEST_NIXL_OVER=rxe0:1 UCX_TLS=rc,ud UCX_IB_GID_INDEX=${entry##*/}

# The wheel's own copy of the verbs library does not find the system's driver for this device.
for name in ibverbs mlx5; do
  for copy in "$VIRTUAL_ENV"/lib/python3*/site-packages/nixl_cu1?.libs/lib$name-*.so.1*; do
    [ -e "$copy" ] && ln -sf "/usr/lib/x86_64-linux-gnu/lib$name.so.1" "$copy"
  done
done

export TOWLINE_TESTKIT_WORKER=$TOWLINE_RDMA_WORKER TOWLINE_REQUIRE=nixl TOWLINE_EXPECT_RDMA=1 UCX_LOG_LEVEL=error
sent() { cat "$device/hw_counters/sent_pkts" 2>/dev/null || echo 0; }
failed=0

echo "booted in $(cut -d' ' -f1 /proc/uptime) s; $(uname -r); $(ls /sys/class/infiniband)"
# One process after another, and beside it the laws: it mostly waits for UCX to notice that a peer has been killed.
"$TOWLINE_RDMA_TESTS" --test-threads=1 --skip bytes_cross --skip pays_nothing --skip says_why --skip listens >"$TMPDIR/tests.log" 2>&1 &
tests=$!
TOWLINE_CUDA=off TOWLINE_TEST_SETTING="one process" "$TOWLINE_RDMA_LAWS" nixl:: --test-threads=2 || failed=1
wait $tests || failed=1
cat "$TMPDIR/tests.log"
# UCX is told of no other device, and what this one counts is what went over it.
echo "rxe0: $(sent) packets sent; $(cut -d. -f1 /proc/uptime) s in the guest"
[ "$(sent)" -gt 100000 ] || { echo "FAILED: hardly a packet went over the device"; failed=1; }
exit $failed
