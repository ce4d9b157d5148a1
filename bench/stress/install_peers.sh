#!/usr/bin/env bash
# Install the routers that the stress bench compares with, each into a virtual environment of its own below .peers/.
#   bench/stress/install_peers.sh [NAME...]      NAME: vllm-router, sglang-router, narwhal-inference (default: all)
# PYTHON=... picks the interpreter. What is there already is left as it is.
set -euo pipefail
cd "$(dirname "$0")/../.."

declare -A requirement=(
  [vllm-router]='vllm-router==0.1.17'
  [sglang-router]='sglang-router==0.3.2'
  [narwhal-inference]='narwhal-inference==0.7.0'
)
names=("$@")
[ $# -gt 0 ] || names=(vllm-router sglang-router narwhal-inference)

for name in "${names[@]}"; do
  if [ -z "${requirement[$name]:-}" ]; then
    echo "unknown router $name; known: ${!requirement[*]}" >&2
    exit 2
  fi
  venv=.peers/$name
  if [ -x "$venv/bin/pip" ] && "$venv/bin/pip" show --quiet "$name" 2>/dev/null; then
    echo "$name is there"
    continue
  fi
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet "${requirement[$name]}"
  echo "$name installed"
done
