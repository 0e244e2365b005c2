#!/usr/bin/env bash
# Builds a real Kubernetes with the Go tool chain alone: control plane, kubelet, kube-proxy; and CoreDNS and Helm.
# Once for all checkouts of a user. usage: build.sh [FOLDER]     default: ${XDG_CACHE_HOME:-~/.cache}/streamtrain/kubernetes
# Measured on two cores: about 7 min idle (14 min beside other load), 13 min of CPU; five Kubernetes binaries of 70 to 102 MB.
# 1.34: from 1.35 on, the kubelet wants cgroup v2 and containerd 2; this kind of machine has cgroup v1, Debian containerd 1.6.
set -euo pipefail
version=1.34.4 coredns=v1.12.4 helm=v3.18.6
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/streamtrain/kubernetes}
mkdir -p "$folder/bin" && cd "$folder"
for tool in kube-{apiserver,controller-manager,scheduler,proxy} kubelet coredns helm; do [ -x "bin/$tool" ] || missing=yes; done
[ -n "${missing:-}" ] || exit 0
[ -f go.mod ] || printf 'module probe\ngo 1.24.0\n' > go.mod
source=$(go mod download -json "k8s.io/kubernetes@v$version" | python3 -c 'import json, sys; print(json.load(sys.stdin)["Dir"])')
{
  printf 'module localkube\ngo 1.24.0\nrequire k8s.io/kubernetes v%s\n' "$version"
  # What Kubernetes replaces by folders of its own tree is published as modules of version 0.x.
  grep -oE 'k8s\.io/[a-z0-9-]+ v0\.0\.0$' "$source/go.mod" | awk -v v="v0.${version#1.}" '{print "replace", $1, "=>", $1, v}' | sort -u
} > go.mod
cat > tools.go <<'G'
//go:build tools

package tools

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-proxy"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubelet"
)
G
go mod tidy
stamp="-X k8s.io/component-base/version.gitVersion=v$version -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${version:2:2}"
CGO_ENABLED=0 go build -ldflags="-s -w $stamp" -o bin/ k8s.io/kubernetes/cmd/kube-{apiserver,controller-manager,scheduler,proxy} k8s.io/kubernetes/cmd/kubelet
(cd "$(mktemp -d)" && CGO_ENABLED=0 GOBIN="$folder/bin" go install "github.com/coredns/coredns@$coredns" && GOBIN="$folder/bin" go install "helm.sh/helm/v3/cmd/helm@$helm")
ls -l bin
