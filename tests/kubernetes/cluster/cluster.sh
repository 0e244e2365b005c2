#!/usr/bin/env bash
# A real Kubernetes on one machine without internet, for `make kubernetes`: etcd, control plane, kube-proxy, CoreDNS, and NODES nodes, each a kubelet with a
# containerd of its own. Pods are containers (runc) with addresses of their own on a bridge that only this machine sees.
# usage: cluster.sh up FOLDER [NODES] | down FOLDER | lose FOLDER NODE (kill -9 of a node and of all its pods) | revive FOLDER NODE
# Then: export KUBECONFIG=FOLDER/kubeconfig. Binaries: build.sh (KUBE_BIN). Debian: etcd-server containerd runc containernetworking-plugins iptables.
# Images: `ctr -a FOLDER/nodeN/containerd.sock -n k8s.io images import X.tar` on each node, and imagePullPolicy: Never.
set -euo pipefail
what=$1 folder=$(realpath -m "$2") bin=${KUBE_BIN:-${XDG_CACHE_HOME:-$HOME/.cache}/streamtrain/kubernetes/bin} here=$(cd "$(dirname "$0")" && pwd)
gateway=10.88.0.1 dns=10.96.0.10 services=10.96.0.0/24 pods=10.88.0.0/24
export KUBECONFIG=$folder/kubeconfig

start() { # NAME COMMAND…
  local name=$1; shift
  setsid "$@" > "$folder/$name.log" 2>&1 < /dev/null & echo $! > "$folder/$name.pid"
}
end() { # NAME [SIGNAL]; the next cluster wants its ports, so it waits
  [ -f "$folder/$1.pid" ] || return 0
  local pid; pid=$(cat "$folder/$1.pid")
  kill "-${2:-TERM}" "$pid" 2>/dev/null || true
  timeout 10 tail --pid="$pid" -f /dev/null || kill -KILL "$pid" 2>/dev/null || true
  rm -f "$folder/$1.pid"
}
until_true() { for _ in $(seq 1 240); do "$@" >/dev/null 2>&1 && return; sleep .25; done; echo "no: $*" >&2; return 1; }

node() {
  local n=node$1 port=$((10250 + 10 * $1)) d=$folder/node$1
  mkdir -p "$d/cni"
  cat > "$d/cni/10-bridge.conflist" <<C
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true, "hairpinMode": true,
 "ipam": {"type": "host-local", "dataDir": "$folder/ipam", "ranges": [[{"subnet": "$pods", "gateway": "$gateway"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
C
  # restrict_oom_score_adj: root here has no CAP_SYS_RESOURCE, and runc fails with "can't get final child's PID" without it
  cat > "$d/containerd.toml" <<C
version = 2
root = "$d/root"
state = "$d/state"
[grpc]
  address = "$d/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$d/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
C
  start "$n-containerd" containerd -c "$d/containerd.toml"
  until_true ctr -a "$d/containerd.sock" version
  ctr -a "$d/containerd.sock" -n k8s.io images import "$folder/pause.tar" >/dev/null
  cat > "$d/kubelet.yaml" <<C
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://$d/containerd.sock
address: $gateway
port: $port
healthzPort: $((port + 2))
readOnlyPort: 0
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
clusterDNS: ["$dns"]
clusterDomain: cluster.local
nodeStatusUpdateFrequency: 2s
nodeLeaseDurationSeconds: 8
evictionHard: {memory.available: 100Mi}
C
  start "$n-kubelet" "$bin/kubelet" --kubeconfig "$KUBECONFIG" --config "$d/kubelet.yaml" --root-dir "$d/kubelet" --hostname-override "$n" --node-ip "$gateway"
}

up() {
  mkdir -p "$folder"; cd "$folder"
  ip link add pods0 type bridge 2>/dev/null || true; ip addr replace $gateway/24 dev pods0; ip link set pods0 up; sysctl -qw net.ipv4.ip_forward=1
  ip route replace $services dev pods0 # what kube-proxy does not know yet stays here, and finds nobody
  python3 "$here/pause.py" "$folder/pause.tar"
  start etcd etcd --data-dir etcd --listen-client-urls http://127.0.0.1:32379 --advertise-client-urls http://127.0.0.1:32379 \
    --listen-peer-urls http://127.0.0.1:32380 --initial-advertise-peer-urls http://127.0.0.1:32380 --initial-cluster default=http://127.0.0.1:32380
  [ -f sa.key ] || openssl genrsa -out sa.key 2048 2>/dev/null
  token=$(openssl rand -hex 16); echo "$token,admin,admin,system:masters" > tokens.csv
  start apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:32379 --secure-port=36443 --bind-address=$gateway --advertise-address=$gateway \
    --cert-dir=certs --service-account-issuer=https://kubernetes.default --service-account-key-file=sa.key --service-account-signing-key-file=sa.key \
    --token-auth-file=tokens.csv --authorization-mode=RBAC --service-cluster-ip-range=$services --kubelet-preferred-address-types=InternalIP
  cat > kubeconfig <<C
apiVersion: v1
kind: Config
clusters: [{name: here, cluster: {server: "https://$gateway:36443", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: "$token"}}]
contexts: [{name: here, context: {cluster: here, user: admin}}]
current-context: here
C
  chmod 600 kubeconfig tokens.csv sa.key
  until_true kubectl get ns default
  # A lost node is noticed after 10 s instead of 50.
  start controllers "$bin/kube-controller-manager" --kubeconfig kubeconfig --service-account-private-key-file=sa.key --root-ca-file=certs/apiserver.crt \
    --leader-elect=false --bind-address=127.0.0.1 --allocate-node-cidrs=false --node-monitor-grace-period=10s --node-monitor-period=2s
  start scheduler "$bin/kube-scheduler" --kubeconfig kubeconfig --leader-elect=false --bind-address=127.0.0.1
  for i in $(seq 0 $((${1:-1} - 1))); do node "$i"; done
  cat > proxy.yaml <<C
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: $KUBECONFIG}
mode: iptables
clusterCIDR: $pods
hostnameOverride: node0
bindAddress: 127.0.0.1
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
C
  start proxy "$bin/kube-proxy" --config proxy.yaml
  if [ -x "$bin/coredns" ]; then
    ip addr replace $dns/32 dev pods0
    printf 'cluster.local:53 {\n  bind %s\n  errors\n  kubernetes cluster.local {\n    kubeconfig %s here\n    ttl 1\n  }\n}\n' "$dns" "$KUBECONFIG" > Corefile
    start coredns "$bin/coredns" -conf Corefile
  fi
  until_true kubectl get serviceaccount default
  kubectl wait --for=condition=Ready node --all --timeout=60s
}

lose() {
  end "$1-kubelet" KILL; end "$1-containerd" KILL
  for shim in $(pgrep -f "containerd-shim-runc-v2 .*$folder/$1/containerd.sock" || true); do
    kill -KILL $(pgrep -P "$shim") "$shim" 2>/dev/null || true # a shim's children are the pod's containers
  done
}

down() {
  for f in "$folder"/node*/; do lose "$(basename "$f")"; done
  for name in coredns proxy scheduler controllers apiserver etcd; do end $name; done
  "$bin/kube-proxy" --cleanup >/dev/null 2>&1 || true
  grep -o "$folder/[^ ]*" /proc/mounts | tac | xargs -r -n1 umount -l 2>/dev/null || true
  for ns in $(ls /run/netns 2>/dev/null | grep '^cni-' || true); do ip netns del "$ns" || true; done
  ip link del pods0 2>/dev/null || true
}

case $what in up) up "${3:-1}" ;; down) down ;; lose) lose "$3" ;; revive) cd "$folder"; node "${3#node}" ;; *) sed -n 2,6p "$0"; exit 2 ;; esac
